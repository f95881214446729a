//! The files of a request: model and adapter folders, opened and checked before anything is put on a device, and prompts
//! as token ids.

use std::cell::OnceCell;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use wgmoe::adapter::Adapter;
use wgmoe::checkpoint::{Checkpoint, ModelConfig};
#[cfg(feature = "mpi")]
use wgmoe::exchange::Exchange as _;
use wgmoe::plan::exchange::ExchangeWay;
use wgmoe::text::{ChatTemplate, Tokenizer};

#[cfg(feature = "mpi")]
use crate::ranks::places;
use crate::ranks::{ExchangeOption, RankOptions, Share, World};
use crate::requests::Prompt;
use crate::target::Target;
use crate::values::{folder, size};
use crate::{Device, usage};

/// What to run.
#[derive(Args)]
#[command(next_help_heading = "Model")]
pub struct ModelFiles {
    /// Model folder: config.json, *.safetensors, and tokenizer.json where text is used
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Adapter folder to load under a name; give it several times for several adapters
    #[arg(long = "lora", value_name = "NAME=DIR", value_parser = named_dir)]
    pub loras: Vec<(String, PathBuf)>,
    /// Device memory for adapters, such as 512MiB: more of them take turns [default: as much as they need]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub adapter_memory: Option<u64>,
    /// Record how often each expert of each layer is chosen, as JSON for `wgmoe placement`
    #[arg(long, value_name = "FILE")]
    pub trace_routing: Option<PathBuf>,
    #[command(flatten)]
    pub ranks: RankOptions,
    #[command(flatten)]
    pub exchange: ExchangeOption,
    /// Ranks are the processes that mpirun started: rank 0 reads and writes, the others follow
    #[cfg(feature = "mpi")]
    #[arg(long, help_heading = "Ranks")]
    pub mpi: bool,
}

fn named_dir(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, dir)) if !name.is_empty() && !dir.is_empty() => Ok((name.to_owned(), dir.into())),
        _ => Err("expected NAME=DIR".into()),
    }
}

impl ModelFiles {
    /// A name that no `--lora` loads is a usage error; `place` says where it stands. The base (`None`) always fits.
    pub fn check_adapter(&self, place: &str, name: Option<&str>) -> anyhow::Result<()> {
        match name {
            Some(name) if !self.loras.iter().any(|(loaded, _)| loaded == name) => {
                let names: Vec<_> = self.loras.iter().map(|(name, _)| format!("`{name}`")).collect();
                let loaded = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
                Err(usage(format!("{place}: adapter `{name}` is not loaded; --lora loads {loaded}")))
            }
            _ => Ok(()),
        }
    }

    /// Who the other ranks are. `None` in a process that is one of them, which has done its work then.
    pub fn join(&self, device: &Device) -> anyhow::Result<Option<World>> {
        self.exchange.way(&self.ranks)?;
        #[cfg(feature = "mpi")]
        if self.mpi {
            return self.join_processes(device);
        }
        let _ = device;
        let world = self.ranks.topology(0)?.world();
        Ok(Some(if world == 1 { World::Alone } else { World::Threads }))
    }

    #[cfg(feature = "mpi")]
    fn join_processes(&self, device: &Device) -> anyhow::Result<Option<World>> {
        let line = wgmoe::exchange::mpi::Mpi::join()?;
        let (rank, ranks, local_rank) = (line.rank(), line.ranks(), line.local_rank());
        let world = World::Processes(Box::new(line));
        let share = self.share(&world);
        let asked = share.options.topology(0)?.world();
        if asked != ranks {
            return Err(usage(format!("--mpi: expected {asked} processes for --tp and --ep, got {ranks}")));
        }
        let World::Processes(mut line) = world else { return Ok(None) };
        if rank == 0 {
            return Ok(Some(World::Processes(line)));
        }
        let places = places(device);
        match device.open_at(places[local_rank % places.len()], device.tier()) {
            Ok(gpu) => share.follow(&gpu, line)?,
            Err(e) => {
                line.fail(&format!("{e:#}"));
                return Err(e);
            }
        }
        Ok(None)
    }

    fn share(&self, world: &World) -> Share {
        let mut options = self.ranks.clone();
        if let (Some(ranks), None, None) = (world.processes(), options.tp, options.ep) {
            options.ep = Some(ranks);
        }
        Share { model: self.model.clone(), loras: self.loras.clone(), options }
    }

    /// Opens and checks every file, of adapters what rank 0 owns; nothing is put on a device yet.
    pub fn open(&self, world: &World) -> anyhow::Result<Files> {
        for (index, (name, _)) in self.loras.iter().enumerate() {
            if self.loras[..index].iter().any(|(earlier, _)| earlier == name) {
                return Err(usage(format!("--lora: the name `{name}` is given twice")));
            }
        }
        let exchange = self.exchange.way(&self.ranks)?;
        if self.trace_routing.is_some() && exchange == Some(ExchangeWay::Dispatch) {
            return Err(usage(
                "--trace-routing: with --exchange dispatch no rank sees all choices; use --exchange sums",
            ));
        }
        let trace = self.trace_routing.as_deref().map(|path| Target::reserve("--trace-routing", path)).transpose()?;
        folder("--model", &self.model, "config.json")?;
        for (name, dir) in &self.loras {
            folder(&format!("--lora {name}"), dir, "adapter_config.json")?;
        }
        let checkpoint = Checkpoint::open(&self.model)?;
        let share = self.share(world);
        let owned = share.options.share(checkpoint.config(), share.options.topology(0)?)?;
        let tokenizer = Tokenizer::open(&self.model)?;
        let adapters = share.adapters(checkpoint.config(), &owned)?;
        let template = OnceCell::new();
        let adapter_memory = self.adapter_memory;
        Ok(Files { checkpoint, tokenizer, template, adapters, adapter_memory, exchange, trace, share })
    }
}

/// A checked model folder with its adapters.
pub struct Files {
    pub checkpoint: Checkpoint,
    tokenizer: Option<Tokenizer>,
    template: OnceCell<ChatTemplate>,
    pub adapters: Vec<(String, Adapter)>,
    pub adapter_memory: Option<u64>,
    /// Where the choices of experts go.
    pub trace: Option<Target>,
    pub exchange: Option<ExchangeWay>,
    pub share: Share,
}

impl Files {
    pub fn config(&self) -> &ModelConfig {
        self.checkpoint.config()
    }

    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// Token ids of a prompt, checked against the model: not empty, in the vocabulary, no longer than the context.
    pub fn ids(&self, place: &str, prompt: &Prompt) -> anyhow::Result<Vec<u32>> {
        let ids = self.any_ids(place, prompt)?;
        self.check_ids(place, &ids)?;
        Ok(ids)
    }

    /// Token ids of a prompt of any length, not checked.
    pub fn any_ids(&self, place: &str, prompt: &Prompt) -> anyhow::Result<Vec<u32>> {
        Ok(match prompt {
            Prompt::Ids(ids) => ids.clone(),
            Prompt::Text(text) => self.text_tokenizer(place)?.encode(text)?,
            Prompt::Messages(messages) => {
                let tokenizer = self.text_tokenizer(place)?;
                let text = self.template(place)?.render(messages).with_context(|| place.to_owned())?;
                tokenizer.encode_rendered(&text)?
            }
        })
    }

    pub fn check_ids(&self, place: &str, ids: &[u32]) -> anyhow::Result<()> {
        let config = self.config();
        if ids.is_empty() {
            return Err(usage(format!("{place}: the prompt has no tokens")));
        }
        if ids.len() > config.max_positions {
            return Err(usage(format!(
                "{place}: the prompt has {} tokens, longer than the model's context of {}",
                ids.len(),
                config.max_positions
            )));
        }
        match ids.iter().find(|id| **id as usize >= config.vocab) {
            Some(id) => Err(usage(format!("{place}: token id {id} is outside the vocabulary of {}", config.vocab))),
            None => Ok(()),
        }
    }

    fn text_tokenizer(&self, place: &str) -> anyhow::Result<&Tokenizer> {
        let dir = self.checkpoint.dir().display();
        self.tokenizer()
            .ok_or_else(|| usage(format!("{place}: `{dir}` has no tokenizer.json, so prompts must be `ids`")))
    }

    fn template(&self, place: &str) -> anyhow::Result<&ChatTemplate> {
        if let Some(template) = self.template.get() {
            return Ok(template);
        }
        let dir = self.checkpoint.dir();
        let template = ChatTemplate::open(dir)?.ok_or_else(|| {
            usage(format!("{place}: `{}` has no chat template; give the whole prompt as raw text", dir.display()))
        })?;
        Ok(self.template.get_or_init(|| template))
    }
}
