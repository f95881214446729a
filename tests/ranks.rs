//! Several ranks in one process answer as one rank does: every arrangement and placement, adapters mixed in the batch.

#[path = "common/device.rs"]
mod device;
mod common;
mod files;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use common::each_case;
use files::{TINY, biased, data, json_file};
use tempfile::TempDir;
use wgmoe::exchange::{Exchange, Local};
use wgmoe::placement::{PlacementRule, Topology};
use wgmoe::plan::exchange::ExchangeWay;
use wgmoe::{
    Adapter, Checkpoint, Engine, EngineOptions, ErrorKind, Event, Gpu, LoadOptions, Model, Request, Result, Worker,
};

/// Prompt, answer length and adapter of a request.
type Asked = (Vec<u32>, usize, Option<&'static str>);
/// Log-probabilities of a prompt's positions, and the answer.
type Answer = (Vec<f32>, Vec<u32>);
/// `--tp` and `--ep`.
type World = (Option<usize>, Option<usize>);
/// Each rank's place and rule.
type OfRank<'a> = &'a (dyn Fn(usize) -> (Topology, PlacementRule) + Sync);

/// A model, its adapters, and what it is asked.
struct Service {
    model: PathBuf,
    adapters: Vec<(&'static str, PathBuf)>,
    requests: Vec<Asked>,
    /// Ranks exchange sums unless a test says otherwise.
    options: EngineOptions,
    experts: usize,
    /// Keeps a folder that was written for the test.
    _written: Option<TempDir>,
}

impl Service {
    /// Heads 4, key and value heads 2: two ranks share out both, four ranks the queries, three or eight ranks nothing.
    fn tiny() -> Self {
        let model = data(TINY);
        let names = ["all_linear", "attn_only", "down_only", "experts2d_some", "experts3d", "gate_up_only"];
        let mut adapters: Vec<_> = names.map(|name| (name, model.join("adapters").join(name))).into();
        let written = biased(&adapters[1].1);
        adapters.push(("biased", written.path().to_owned()));
        let requests: [(&[u32], usize, Option<&str>); 9] = [
            (&[11, 200, 3, 45, 78, 9, 120], 6, None),
            (&[5], 6, Some("experts3d")),
            (&[77, 31, 8], 5, Some("all_linear")),
            (&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], 4, Some("down_only")),
            (&[250, 1], 0, Some("attn_only")),
            (&[33, 33], 6, Some("gate_up_only")),
            (&[9, 8, 7], 3, Some("experts2d_some")),
            (&[100], 2, None),
            (&[18, 4, 66, 2], 2, Some("biased")),
        ];
        Self {
            model,
            adapters,
            requests: requests.map(|(prompt, n, adapter)| (prompt.to_vec(), n, adapter)).into(),
            // Slots are fewer than adapters: on each rank they take turns. Small steps, so that prompts take several.
            options: EngineOptions {
                adapter_slots: 4,
                max_step_tokens: 8,
                max_context: 64,
                exchange: Some(ExchangeWay::Sums),
                ..EngineOptions::default()
            },
            experts: 8,
            _written: Some(written),
        }
    }

    /// The demonstration model, asked the shortest prompt of its reference for each adapter and the base.
    fn demo() -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/demo");
        let names = ["shout", "mirror", "piglatin", "rot13"];
        let reference = json_file(&folder.join("reference.json"));
        let prompts = |name: Option<&'static str>| {
            let all = reference["greedy"].as_array().unwrap().iter().filter(|g| g["adapter"].as_str() == name);
            let ids = all.map(|g| serde_json::from_value::<Vec<u32>>(g["prompt_ids"].clone()).unwrap());
            (ids.min_by_key(Vec::len).unwrap(), 4, name)
        };
        Self {
            model: folder.join("base"),
            adapters: names.map(|name| (name, folder.join("adapters").join(name))).into(),
            requests: std::iter::once(None).chain(names.map(Some)).map(prompts).collect(),
            options: EngineOptions {
                adapter_slots: 4,
                max_context: 64,
                exchange: Some(ExchangeWay::Sums),
                ..EngineOptions::default()
            },
            experts: 16,
            _written: None,
        }
    }

    /// Every second rank reads of the adapters what it holds; the others read all and cut it in the pool.
    fn load(&self, gpu: &Gpu, topology: Topology, placement: PlacementRule) -> (Model, Vec<Adapter>) {
        let checkpoint = Checkpoint::open(&self.model).unwrap();
        let options = LoadOptions { topology, placement, ..LoadOptions::default() };
        let (model, _) = Model::load(gpu, &checkpoint, &options, &mut |_, _| {}).unwrap();
        let open = |(_, dir): &(_, PathBuf)| match topology.rank() % 2 {
            0 => Adapter::open(dir, model.config()).unwrap(),
            _ => Adapter::open_for(dir, model.config(), model.share()).unwrap(),
        };
        let adapters = self.adapters.iter().map(open).collect();
        (model, adapters)
    }

    /// What rank 0 does.
    fn serve(&self, engine: &mut Engine) -> Result<Vec<Answer>> {
        let ids: Vec<_> = self
            .requests
            .iter()
            .map(|(prompt, max_tokens, adapter)| {
                let adapter = adapter.map(|name| engine.adapter(name).unwrap());
                let (prompt, max_tokens) = (prompt.clone(), *max_tokens);
                engine.submit(Request { prompt, adapter, max_tokens, logits: true, ..Request::default() })
            })
            .collect::<Result<_>>()?;
        let vocab = engine.config().vocab;
        let mut answers: BTreeMap<_, Answer> = ids.iter().map(|id| (*id, Answer::default())).collect();
        while !engine.is_idle() {
            engine.begin_step()?;
            for event in engine.wait()? {
                match event {
                    Event::Logits { sequence, rows, .. } => {
                        answers.get_mut(&sequence).unwrap().0.extend(rows.chunks(vocab).flat_map(log_softmax));
                    }
                    Event::Token { sequence, id } => answers.get_mut(&sequence).unwrap().1.push(id),
                    Event::Finished { .. } => {}
                    Event::Failed { error, .. } => return Err(error),
                }
            }
        }
        Ok(ids.iter().map(|id| answers.remove(id).unwrap()).collect())
    }

    fn one_rank(&self, gpu: &Gpu) -> Vec<Answer> {
        let (model, adapters) = self.load(gpu, Topology::default(), PlacementRule::Linear);
        let mut engine = Engine::new(gpu, model, self.options.clone()).unwrap();
        for ((name, _), adapter) in self.adapters.iter().zip(&adapters) {
            engine.load_adapter(name, adapter).unwrap();
        }
        self.serve(&mut engine).unwrap()
    }

    /// Runs every rank in a thread of its own and returns what each says: answers from rank 0, nothing from the others.
    /// `leaves` is a rank that ends before the first step.
    fn on_ranks(
        &self,
        gpu: &Gpu,
        ranks: usize,
        of_rank: OfRank<'_>,
        leaves: Option<usize>,
    ) -> Vec<Result<Vec<Answer>>> {
        self.on_devices(&vec![gpu; ranks], of_rank, leaves)
    }

    /// The same with a device for each rank.
    fn on_devices(&self, gpus: &[&Gpu], of_rank: OfRank<'_>, leaves: Option<usize>) -> Vec<Result<Vec<Answer>>> {
        let rank = |line: Local| {
            let rank = line.rank();
            let gpu = gpus[rank];
            let (topology, rule) = of_rank(rank);
            let (model, adapters) = self.load(gpu, topology, rule);
            if rank == 0 {
                let mut engine = Engine::with_ranks(gpu, model, self.options.clone(), Box::new(line))?;
                assert_eq!(engine.options().exchange, self.options.exchange);
                for ((name, _), adapter) in self.adapters.iter().zip(&adapters) {
                    engine.load_adapter(name, adapter)?;
                }
                let answers = self.serve(&mut engine)?;
                engine.end()?;
                return Ok(answers);
            }
            let mut worker = Worker::new(gpu, model, Box::new(line))?;
            for ((name, _), adapter) in self.adapters.iter().zip(&adapters) {
                worker.load_adapter(name, adapter)?;
            }
            if leaves == Some(rank) {
                return Ok(Vec::new());
            }
            worker.run().map(|()| Vec::new())
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = Local::lines(gpus.len()).into_iter().map(|line| scope.spawn(|| rank(line))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    /// Every expert on one group, some on more.
    fn copies(&self, groups: usize) -> PlacementRule {
        let owners = |e: usize| (0..1 + e % groups).map(|i| (e * 3 + i) % groups).collect();
        PlacementRule::Table((0..self.experts).map(owners).collect())
    }

    /// Every world answers as one rank does, under every placement.
    fn answers_as_one(&self, gpu: &Gpu, worlds: &[World]) {
        let rules = |world: World| {
            let copies = self.copies(world.1.unwrap_or(1));
            [PlacementRule::Linear, PlacementRule::RoundRobin, copies].map(|rule| (world, rule))
        };
        self.cases_answer_as_one(gpu, &worlds.iter().copied().flat_map(rules).collect::<Vec<_>>());
    }

    fn cases_answer_as_one(&self, gpu: &Gpu, cases: &[(World, PlacementRule)]) {
        let expected = self.one_rank(gpu);
        // f16 operands are rounded anew on every rank, which a close call of ids may show.
        let matrix = gpu.capabilities().matrix;
        let allowed = if matrix { common::TOL_MATRIX_LOGITS } else { 1e-4 };
        each_case(cases, |((tp, ep), rule)| {
            let of_rank = |rank| (Topology::new(*tp, *ep, rank).unwrap(), rule.clone());
            let mut all = self.on_ranks(gpu, tp.or(*ep).unwrap(), &of_rank, None);
            if let Some(e) = all.iter().find_map(|r| r.as_ref().err()) {
                return Err(e.to_string());
            }
            for (i, ((logs, answer), (want_logs, want))) in all.remove(0).unwrap().iter().zip(&expected).enumerate() {
                if answer != want && !matrix {
                    return Err(format!("request {i}: {answer:?}, expected {want:?}"));
                }
                let off = logs.iter().zip(want_logs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                if logs.len() != want_logs.len() || off.is_nan() || off > allowed {
                    return Err(format!("request {i}: log-probabilities differ by {off}"));
                }
            }
            Ok(())
        });
    }
}

fn log_softmax(row: &[f32]) -> Vec<f32> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f32 = row.iter().map(|v| (v - max).exp()).sum();
    row.iter().map(|v| v - max - sum.ln()).collect()
}

/// The highest tier of f32 arithmetic, and the matrix tier where there is one.
fn tiers() -> Vec<Gpu> {
    let mut tiers = device::every_tier();
    let mut last = |matrix: bool| {
        let at = tiers.iter().rposition(|gpu| gpu.capabilities().matrix == matrix)?;
        Some(tiers.remove(at))
    };
    [last(false), last(true)].into_iter().flatten().collect()
}

const fn both(tp: usize, ep: usize) -> World {
    (Some(tp), Some(ep))
}

/// Without `--tp` attention is whole on every rank.
const EXPERTS_ALONE: [World; 2] = [(None, Some(2)), (None, Some(4))];
const WORLDS: [World; 7] = [both(1, 1), both(2, 1), both(2, 2), both(4, 2), both(4, 4), both(8, 2), both(3, 3)];

#[test]
fn several_ranks_answer_as_one_does() {
    let service = Service::tiny();
    for gpu in tiers() {
        service.answers_as_one(&gpu, &[&WORLDS[..], &EXPERTS_ALONE].concat());
    }
}

#[test]
fn several_ranks_answer_as_one_does_with_the_demonstration_model() {
    let service = Service::demo();
    for gpu in tiers() {
        service.answers_as_one(&gpu, &WORLDS);
    }
}

/// The tiny model, whose sequences are shared out: five at a time, so that they wait for each other and of eight ranks three
/// never have a token.
fn dispatching() -> Service {
    let mut service = Service::tiny();
    service.options.max_sequences = 5;
    service.options.exchange = Some(ExchangeWay::Dispatch);
    service
}

#[test]
fn ranks_that_dispatch_answer_as_one_does() {
    let service = dispatching();
    // The rank in the middle has no expert; expert 5 is on both others.
    let two_of_three =
        PlacementRule::Table((0..8).map(|e| if e == 5 { vec![0, 2] } else { vec![e % 2 * 2] }).collect());
    for gpu in tiers() {
        service.answers_as_one(&gpu, &[1, 2, 3, 4, 8].map(|ep| (None, Some(ep))));
        service.cases_answer_as_one(&gpu, &[((None, Some(3)), two_of_three.clone())]);
    }
}

#[test]
fn a_rank_that_leaves_ends_all() {
    let Some(gpu) = device::every_tier().into_iter().next() else { return };
    for service in [Service::tiny(), dispatching()] {
        let of_rank = |rank| (Topology::new(None, Some(3), rank).unwrap(), PlacementRule::Linear);
        for (rank, result) in service.on_ranks(&gpu, 3, &of_rank, Some(2)).into_iter().enumerate() {
            match result {
                Ok(answers) => assert!(rank == 2 && answers.is_empty(), "rank {rank}"),
                Err(e) => assert_eq!(e.to_string(), "rank 2: ended early", "rank {rank}"),
            }
        }
    }
}

#[test]
fn ranks_that_share_out_each_sequence_cannot_dispatch() {
    let Some(gpu) = device::every_tier().into_iter().next() else { return };
    for ep in [2, 4] {
        let of_rank = |rank| (Topology::new(Some(4), Some(ep), rank).unwrap(), PlacementRule::Linear);
        for (rank, result) in dispatching().on_ranks(&gpu, 4, &of_rank, None).into_iter().enumerate() {
            let error = result.map(|_| ()).unwrap_err().to_string();
            let expected = format!("exchange `dispatch` with `tp` 4 and `ep` {ep}");
            assert!(error.contains(&expected), "rank {rank}: {error}");
        }
    }
}

#[test]
fn ranks_on_different_devices_dispatch_and_do_not_add_up() {
    let tiers = device::every_tier();
    let f32_tiers: Vec<&Gpu> = tiers.iter().filter(|gpu| !gpu.capabilities().matrix).collect();
    let &[low, high, ..] = &f32_tiers[..] else { return };
    let of_rank = |rank| (Topology::new(None, Some(2), rank).unwrap(), PlacementRule::Linear);
    for (rank, result) in Service::tiny().on_devices(&[low, high], &of_rank, None).into_iter().enumerate() {
        let error = result.map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Rank, "rank {rank}: {error}");
        assert!(error.to_string().contains("their devices must compute alike"), "rank {rank}: {error}");
    }
    let service = dispatching();
    let expected = service.one_rank(high);
    let answers = service.on_devices(&[low, high], &of_rank, None).remove(0).unwrap();
    for ((logs, answer), (want_logs, want)) in answers.iter().zip(&expected) {
        let off = logs.iter().zip(want_logs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(answer == want && off < 1e-3, "{answer:?}, expected {want:?}, off by {off}");
    }
}

/// What each rank says, where rank 1 was given something else than the others.
fn disagreement(of_rank: OfRank<'_>, expected: &str) {
    let Some(gpu) = device::every_tier().into_iter().next() else { return };
    for (rank, result) in Service::tiny().on_ranks(&gpu, 3, of_rank, None).into_iter().enumerate() {
        let error = result.map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Rank, "rank {rank}: {error}");
        assert!(error.to_string().contains(expected), "rank {rank}: {error}");
    }
}

#[test]
fn ranks_that_were_given_different_placements_find_out() {
    let rule = |rank| if rank == 1 { PlacementRule::RoundRobin } else { PlacementRule::Linear };
    disagreement(&|rank| (Topology::new(Some(3), Some(3), rank).unwrap(), rule(rank)), "placement RoundRobin");
}

#[test]
fn ranks_that_do_not_all_share_attention_out_find_out() {
    let tp = |rank| if rank == 1 { None } else { Some(3) };
    disagreement(&|rank| (Topology::new(tp(rank), Some(3), rank).unwrap(), PlacementRule::Linear), "attention 1");
}

#[test]
fn a_share_of_a_model_is_no_model_for_one_rank() {
    let Some(gpu) = device::every_tier().into_iter().next() else { return };
    let service = Service::tiny();
    let (model, _) = service.load(&gpu, Topology::new(None, Some(2), 0).unwrap(), PlacementRule::Linear);
    let error = Engine::new(&gpu, model, service.options.clone()).map(|_| ()).unwrap_err();
    assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains("2 ranks"), "{error}");
}
