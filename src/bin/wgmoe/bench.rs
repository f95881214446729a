//! `wgmoe bench`: what a layer or a whole model costs here, and what the device would allow.

mod layer;
mod limits;
mod model;
mod oracle;
mod report;
mod roofline;
mod routing;
mod shape;
mod synthetic;
mod timed;
mod timing;

use clap::{Args, Subcommand};

/// Measure what a layer or a whole model costs on this device, beside what the device allows
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
}

pub fn run(options: &Options) -> anyhow::Result<()> {
    match &options.what {
        What::Layer(options) => layer::run(options),
        What::Model(options) => model::run(options),
    }
}
