//! Several ranks: how many, which device each has, and who they are: threads of this process, or processes of an MPI job.

use std::path::PathBuf;
use std::thread::JoinHandle;

use anyhow::Context;
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};
use wgmoe::adapter::Adapter;
use wgmoe::checkpoint::{Checkpoint, ModelConfig};
use wgmoe::engine::Worker;
use wgmoe::exchange::{Exchange, Local};
use wgmoe::gpu::{Gpu, GpuInfo, Tier};
use wgmoe::model::{LoadOptions, Model};
use wgmoe::placement::{PlacementRule, RankShare, Topology};
use wgmoe::plan::exchange::ExchangeWay;

use crate::values::{file, number};
use crate::{Device, usage};

/// How the model is shared out.
#[derive(Args, Clone)]
#[command(next_help_heading = "Ranks")]
pub struct RankOptions {
    /// Number of ranks; they also share out the heads of attention where these divide [default: --ep ranks, each with all
    /// of attention]
    #[arg(long, value_name = "N", value_parser = number(1..=Topology::MAX_RANKS))]
    pub tp: Option<usize>,
    /// Number of expert groups; divides the number of ranks
    #[arg(long, value_name = "N", value_parser = number(1..=Topology::MAX_RANKS))]
    pub ep: Option<usize>,
    /// How experts are shared out: linear, round-robin, or a JSON file
    #[arg(long, value_name = "RULE|FILE", default_value = "linear", value_parser = NonEmptyStringValueParser::new())]
    pub placement: String,
}

impl RankOptions {
    pub fn topology(&self, rank: usize) -> anyhow::Result<Topology> {
        let given = [("--tp", self.tp), ("--ep", self.ep)];
        let given = || given.iter().filter_map(|(name, n)| Some(format!("{name} {}", (*n)?))).collect::<Vec<_>>();
        Topology::new(self.tp, self.ep, rank).map_err(|e| usage(format!("{}: {e}", given().join(" "))))
    }

    /// What the rank at `topology` holds of a model.
    pub fn share(&self, config: &ModelConfig, topology: Topology) -> anyhow::Result<RankShare> {
        let rule = self.rule()?;
        let share = RankShare::new(config, &rule, topology);
        Ok(share.map_err(|e| e.within(format!("--placement `{}`", self.placement)))?)
    }

    pub fn rule(&self) -> anyhow::Result<PlacementRule> {
        Ok(match self.placement.as_str() {
            "linear" => PlacementRule::Linear,
            "round-robin" => PlacementRule::RoundRobin,
            name => {
                file("--placement", name.as_ref(), "linear, round-robin or a JSON file")?;
                PlacementRule::from_json(name.as_ref()).context("--placement")?
            }
        })
    }
}

/// What ranks exchange.
#[derive(Args, Clone)]
#[command(next_help_heading = "Ranks")]
pub struct ExchangeOption {
    /// What ranks exchange in a layer with experts
    #[arg(long, value_enum, default_value_t = Way::Auto, value_name = "WAY")]
    exchange: Way,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Way {
    /// Dispatch on many ranks with many sequences, sums otherwise
    Auto,
    /// Every rank has every token; the partial outputs of its experts are added up
    Sums,
    /// Sequences are shared out, with attention and cache, and tokens go to the ranks of their experts; with --ep alone, not --tp
    Dispatch,
}

impl ExchangeOption {
    /// The way asked for, checked against the ranks; `None` leaves it to the engine.
    pub fn way(&self, ranks: &RankOptions) -> anyhow::Result<Option<ExchangeWay>> {
        match self.exchange {
            Way::Auto => Ok(None),
            Way::Sums => Ok(Some(ExchangeWay::Sums)),
            Way::Dispatch => match ranks.tp {
                Some(tp) if tp > 1 => Err(usage(format!(
                    "--exchange dispatch with --tp {tp}: it shares out whole sequences, and --tp shares out each of them; \
                     give --ep {tp} without --tp, or --exchange sums"
                ))),
                _ => Ok(Some(ExchangeWay::Dispatch)),
            },
        }
    }
}

/// What every rank loads.
#[derive(Clone)]
pub struct Share {
    pub model: PathBuf,
    pub loras: Vec<(String, PathBuf)>,
    pub options: RankOptions,
}

impl Share {
    pub fn load_options(&self, rank: usize) -> anyhow::Result<LoadOptions<'static>> {
        let (topology, placement) = (self.options.topology(rank)?, self.options.rule()?);
        Ok(LoadOptions { topology, placement, ..LoadOptions::default() })
    }

    /// Does what a rank other than 0 does, until rank 0 ends. All ranks hear of an error.
    pub fn follow(&self, gpu: &Gpu, line: Box<dyn Exchange>) -> anyhow::Result<()> {
        follow(gpu, line, |rank| self.load(gpu, rank))
    }

    fn load(&self, gpu: &Gpu, rank: usize) -> anyhow::Result<Loaded> {
        let checkpoint = Checkpoint::open(&self.model)?;
        let (model, _) = Model::load(gpu, &checkpoint, &self.load_options(rank)?, &mut |_, _| {})?;
        let adapters = self.adapters(checkpoint.config(), model.share())?;
        Ok((model, adapters))
    }

    /// What a rank with the share `owned` of the model has of every adapter, under their names.
    pub fn adapters(&self, config: &ModelConfig, owned: &RankShare) -> anyhow::Result<Vec<(String, Adapter)>> {
        let open = |(name, dir): &(String, PathBuf)| {
            let adapter = Adapter::open_for(dir, config, owned).with_context(|| format!("adapter `{name}`"))?;
            Ok((name.clone(), adapter))
        };
        self.loras.iter().map(open).collect()
    }
}

/// A rank's model, and what it has of every adapter, by name.
pub type Loaded = (Model, Vec<(String, Adapter)>);

/// Does what a rank other than 0 does with what `load` gives it, until rank 0 ends. All ranks hear of an error.
pub fn follow(
    gpu: &Gpu,
    mut line: Box<dyn Exchange>,
    load: impl FnOnce(usize) -> anyhow::Result<Loaded>,
) -> anyhow::Result<()> {
    let (model, adapters) = match load(line.rank()) {
        Ok(loaded) => loaded,
        Err(e) => {
            line.fail(&format!("{e:#}"));
            return Err(e);
        }
    };
    let mut worker = Worker::new(gpu, model, line)?;
    for (name, adapter) in &adapters {
        worker.load_adapter(name, adapter)?;
    }
    Ok(worker.run()?)
}

/// The ranks beside this one.
pub enum World {
    /// None.
    Alone,
    /// Threads, to be started.
    Threads,
    /// Processes of the MPI job; this one is rank 0.
    #[cfg(feature = "mpi")]
    Processes(Box<dyn Exchange>),
}

impl World {
    /// Number of processes of the job.
    pub fn processes(&self) -> Option<usize> {
        match self {
            Self::Alone | Self::Threads => None,
            #[cfg(feature = "mpi")]
            Self::Processes(line) => Some(line.ranks()),
        }
    }
}

/// The other ranks, running.
#[derive(Default)]
pub struct Others {
    threads: Vec<JoinHandle<anyhow::Result<()>>>,
}

impl Others {
    /// Starts the other ranks as threads that `follow`, each on a device of its own opening, and returns the line to them.
    ///
    /// Devices are opened one after the other: a driver may not like to be asked by many threads at once.
    pub fn start(
        options: &RankOptions,
        device: &Device,
        tier: Option<Tier>,
        follow: impl Fn(&Gpu, Box<dyn Exchange>) -> anyhow::Result<()> + Clone + Send + 'static,
    ) -> anyhow::Result<(Self, Box<dyn Exchange>)> {
        let world = options.topology(0)?.world();
        options.rule()?;
        let places = places(device);
        let mut lines = Local::lines(world).into_iter();
        let own = lines.next().context("a world has a first rank")?;
        let opened = lines
            .map(|line| Ok((device.open_at(places[line.rank() % places.len()], tier)?, line)))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let start = |(gpu, line): (Gpu, Local)| {
            let follow = follow.clone();
            std::thread::Builder::new()
                .name(format!("rank {}", line.rank()))
                .spawn(move || follow(&gpu, Box::new(line)))
                .context("starting a rank")
        };
        let threads = opened.into_iter().map(start).collect::<Result<_, _>>()?;
        Ok((Self { threads }, Box::new(own)))
    }

    /// Waits until all have ended. What went wrong on another rank has reached rank 0 by the line.
    pub fn join(&mut self) {
        for thread in self.threads.drain(..) {
            match thread.join() {
                Ok(Ok(())) => {}
                Ok(Err(e)) => log::info!("another rank ended: {e:#}"),
                Err(_) => log::error!("another rank panicked"),
            }
        }
    }
}

/// The devices that ranks take in turn: the one asked for, else every device of the kind of the first.
pub fn places(device: &Device) -> Vec<Option<usize>> {
    if device.device.is_some() {
        return vec![None];
    }
    let all = Gpu::list();
    let kind = |info: &GpuInfo| (info.name.clone(), info.driver.clone());
    match all.first() {
        Some(first) => all.iter().filter(|info| kind(info) == kind(first)).map(|info| Some(info.index)).collect(),
        None => vec![None],
    }
}
