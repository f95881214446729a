//! `wgmoe bench`: what a layer or a whole model costs here, what the device would allow, where one way to do the
//! work becomes better than another, and how products are best cut.

mod layer;
mod limits;
mod measure;
mod model;
mod oracle;
mod report;
mod roofline;
mod routing;
mod shape;
mod synthetic;
mod timed;
mod timing;
mod tune;

use clap::{Args, Subcommand};

/// Measure what a layer or a whole model costs on this device, beside what the device allows, and tune its thresholds
#[derive(Args)]
#[command(arg_required_else_help = true)]
pub struct Options {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Layer(layer::Options),
    Model(model::Options),
    Tune(tune::Options),
}

pub fn run(options: &Options) -> anyhow::Result<()> {
    match &options.what {
        What::Layer(options) => layer::run(options),
        What::Model(options) => model::run(options),
        What::Tune(options) => tune::run(options),
    }
}
