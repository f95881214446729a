//! The facts of an inspection, in the shape of its JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Serialize;
use wgmoe::adapter::{Adapter, Site};
use wgmoe::checkpoint::{Checkpoint, MlpKind, ModelConfig};
use wgmoe::family::class::Group;
use wgmoe::placement::{PlacementRule, RankShare, Topology};
use wgmoe::plan::read::{Bill, ReadPlan, ScalePolicy, StoredLayout};
use wgmoe::plan::resident;

use crate::table::bytes;
use crate::values::folder;

pub struct Input<'a> {
    pub checkpoint: &'a Checkpoint,
    pub rule: &'a PlacementRule,
    /// The rule as it was given.
    pub placement: &'a str,
    pub topologies: &'a [Topology],
    pub scales: ScalePolicy,
    pub binding_limit: u64,
    pub memory: Option<u64>,
    pub device: Option<String>,
    pub loras: &'a [PathBuf],
}

#[derive(Serialize)]
pub struct Report {
    pub dir: String,
    pub model: Model,
    pub tp: usize,
    pub ep: usize,
    pub moe_tp: usize,
    pub attention_tp: usize,
    pub placement: String,
    pub device: Option<String>,
    pub binding_limit: u64,
    pub memory: Option<u64>,
    pub ranks: Vec<Rank>,
    pub adapters: Vec<AdapterReport>,
    /// What does not match or does not fit.
    pub problems: Vec<String>,
}

#[derive(Serialize)]
pub struct Model {
    pub family: &'static str,
    pub layers: usize,
    pub moe_layers: usize,
    pub experts: usize,
    pub top_k: usize,
    pub hidden: usize,
    pub expert_width: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocab: usize,
    pub context: usize,
    pub bytes: u64,
    pub tensors: usize,
    /// Bytes by storage type.
    pub dtypes: BTreeMap<String, u64>,
}

#[derive(Serialize)]
pub struct Rank {
    pub rank: usize,
    pub ep_rank: usize,
    pub moe_tp_rank: usize,
    /// Global ids.
    pub experts: Vec<usize>,
    pub width: Range<usize>,
    pub heads: Range<usize>,
    pub kv_heads: Range<usize>,
    pub read_bytes: u64,
    pub skipped_bytes: u64,
    pub resident_bytes: u64,
    /// Matrix stacks, and the bindings they are cut into.
    pub buffers: usize,
    pub bindings: usize,
    pub largest_buffer: u64,
    pub split: Vec<Split>,
    /// `None` where no memory was given.
    pub fits: Option<bool>,
    pub roles: BTreeMap<Group, Role>,
}

#[derive(Serialize, Default)]
pub struct Role {
    #[serde(flatten)]
    pub bill: Bill,
    pub resident_bytes: u64,
}

#[derive(Serialize)]
pub struct Split {
    pub buffer: String,
    pub bytes: u64,
    pub bindings: usize,
}

#[derive(Serialize)]
pub struct AdapterReport {
    pub dir: String,
    pub ranks: BTreeSet<usize>,
    /// Number of factors at each site.
    pub sites: BTreeMap<String, usize>,
    pub bytes: u64,
    /// Bytes that each rank shown reads of it and holds.
    pub bytes_by_rank: Vec<u64>,
    pub error: Option<String>,
}

impl Report {
    pub fn new(input: &Input) -> anyhow::Result<Self> {
        let config = input.checkpoint.config();
        let mut problems = Vec::new();
        let ranks =
            input.topologies.iter().map(|t| rank(input, *t, &mut problems)).collect::<anyhow::Result<Vec<_>>>()?;
        let adapters: Vec<_> = input.loras.iter().map(|dir| adapter(dir, config, input)).collect();
        problems.extend(adapters.iter().filter_map(|a| a.error.clone()));
        // A world has at least one rank.
        let topology = input.topologies.first().copied().unwrap_or_default();
        Ok(Self {
            dir: input.checkpoint.dir().display().to_string(),
            model: model(input.checkpoint),
            tp: topology.world(),
            ep: topology.ep(),
            moe_tp: topology.moe_tp(),
            attention_tp: topology.attention_tp(),
            placement: input.placement.to_owned(),
            device: input.device.clone(),
            binding_limit: input.binding_limit,
            memory: input.memory,
            ranks,
            adapters,
            problems,
        })
    }
}

fn model(checkpoint: &Checkpoint) -> Model {
    let config = checkpoint.config();
    let mut dtypes = BTreeMap::<String, u64>::new();
    for header in checkpoint.headers() {
        *dtypes.entry(header.dtype.to_owned()).or_default() += header.n_bytes;
    }
    Model {
        family: config.family.model_type(),
        layers: config.n_layers(),
        moe_layers: config.layers.iter().filter(|kind| **kind == MlpKind::Experts).count(),
        experts: config.moe.experts,
        top_k: config.moe.top_k,
        hidden: config.hidden,
        expert_width: config.moe.expert_width,
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        vocab: config.vocab,
        context: config.max_positions,
        bytes: dtypes.values().sum(),
        tensors: checkpoint.names().len(),
        dtypes,
    }
}

fn rank(input: &Input, topology: Topology, problems: &mut Vec<String>) -> anyhow::Result<Rank> {
    let config = input.checkpoint.config();
    let plan =
        ReadPlan::new(input.checkpoint.headers(), &StoredLayout::of(config), input.rule, topology, input.scales)?;
    let stacks = resident::stacks(input.checkpoint, input.rule, topology)?;
    let (mut bindings, mut split) = (0, Vec::new());
    for stack in &stacks {
        match stack.bindings(input.binding_limit) {
            Ok(n) => {
                bindings += n;
                if n > 1 {
                    split.push(Split { buffer: stack.label.clone(), bytes: stack.n_bytes(), bindings: n });
                }
            }
            Err(error) => problems.push(format!("rank {}: {error}", topology.rank())),
        }
    }
    let kept = resident::by_group(&stacks);
    let resident_bytes: u64 = kept.values().sum();
    let fits = input.memory.map(|memory| resident_bytes <= memory);
    if let (Some(false), Some(memory)) = (fits, input.memory) {
        let (need, have) = (bytes(resident_bytes), bytes(memory));
        problems.push(format!("rank {}: the weights need {need}, more than {have}", topology.rank()));
    }
    let heads = RankShare::new(config, input.rule, topology)?.heads;
    let experts = input.rule.place(config.moe.experts, topology)?.owned();
    let width = topology.width_range(config.moe.expert_width);
    if experts.is_empty() || width.is_empty() {
        problems.push(format!("rank {}: holds no part of any expert", topology.rank()));
    }
    let mut roles = BTreeMap::<Group, Role>::new();
    for (group, bill) in &plan.bills {
        roles.entry(*group).or_default().bill = *bill;
    }
    for (group, n) in kept {
        roles.entry(group).or_default().resident_bytes = n;
    }
    Ok(Rank {
        rank: topology.rank(),
        ep_rank: topology.ep_rank(),
        moe_tp_rank: topology.moe_tp_rank(),
        experts,
        width,
        heads: heads.heads(),
        kv_heads: heads.kv_heads(),
        read_bytes: plan.read_bytes(),
        skipped_bytes: plan.skipped_bytes(),
        resident_bytes,
        buffers: stacks.len(),
        bindings,
        largest_buffer: stacks.iter().map(resident::Stack::n_bytes).max().unwrap_or(0),
        split,
        fits,
        roles,
    })
}

fn adapter(dir: &Path, config: &ModelConfig, input: &Input) -> AdapterReport {
    let mut report = AdapterReport {
        dir: dir.display().to_string(),
        ranks: BTreeSet::new(),
        sites: BTreeMap::new(),
        bytes: 0,
        bytes_by_rank: Vec::new(),
        error: None,
    };
    if let Err(error) = folder("--lora", dir, "adapter_config.json") {
        report.error = Some(error.to_string());
    } else if let Err(error) = fill(&mut report, dir, config, input) {
        report.error = Some(format!("adapter `{}`: {error}", dir.display()));
    }
    report
}

fn fill(report: &mut AdapterReport, dir: &Path, config: &ModelConfig, input: &Input) -> wgmoe::Result<()> {
    let adapter = Adapter::open(dir, config)?;
    for factor in &adapter.factors {
        report.ranks.insert(factor.rank);
        *report.sites.entry(site(factor.site).to_owned()).or_default() += 1;
    }
    report.bytes = adapter.bytes_read;
    for topology in input.topologies {
        let share = RankShare::new(config, input.rule, *topology)?;
        report.bytes_by_rank.push(Adapter::open_for(dir, config, &share)?.bytes_read);
    }
    Ok(())
}

fn site(site: Site) -> &'static str {
    match site {
        Site::Q => "q",
        Site::K => "k",
        Site::V => "v",
        Site::O => "o",
        Site::Router => "router",
        Site::Gate => "gate",
        Site::Up => "up",
        Site::Down => "down",
        Site::ExpertGate => "expert gate",
        Site::ExpertUp => "expert up",
        Site::ExpertDown => "expert down",
        Site::SharedGate => "shared gate",
        Site::SharedUp => "shared up",
        Site::SharedDown => "shared down",
        Site::SharedRouter => "shared router",
        Site::Embedding => "embedding",
        Site::LmHead => "lm head",
        _ => "other",
    }
}
