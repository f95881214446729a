//! Several ranks in one process answer as one rank does: every arrangement and placement, adapters mixed in the batch.

#[path = "common/device.rs"]
mod device;
mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::each_case;
use wgmoe::exchange::{Exchange, Local};
use wgmoe::placement::{PlacementRule, Topology};
use wgmoe::{
    Adapter, Checkpoint, Engine, EngineOptions, ErrorKind, Event, Gpu, LoadOptions, Model, Request, Result, Worker,
};

const FOLDER: &str = "tests/data/tiny/qwen3_moe";
/// Four slots for six adapters: on each rank they take turns.
const SLOTS: usize = 4;
const ADAPTERS: [&str; 6] = ["all_linear", "attn_only", "down_only", "experts2d_some", "experts3d", "gate_up_only"];
const EXPERTS: usize = 8;
/// Prompt, answer length and adapter of each request.
const REQUESTS: [(&[u32], usize, Option<&str>); 8] = [
    (&[11, 200, 3, 45, 78, 9, 120], 6, None),
    (&[5], 6, Some("experts3d")),
    (&[77, 31, 8], 5, Some("all_linear")),
    (&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], 4, Some("down_only")),
    (&[250, 1], 0, Some("attn_only")),
    (&[33, 33], 6, Some("gate_up_only")),
    (&[9, 8, 7], 3, Some("experts2d_some")),
    (&[100], 2, None),
];

/// Log-probabilities of a prompt's positions, and the answer.
type Answer = (Vec<f32>, Vec<u32>);

fn options() -> EngineOptions {
    // Small steps, so that prompts take several.
    EngineOptions { adapter_slots: SLOTS, max_step_tokens: 8, max_context: 64, ..EngineOptions::default() }
}

fn load(gpu: &Gpu, topology: Topology, placement: PlacementRule) -> (Model, Vec<Adapter>) {
    let checkpoint = Checkpoint::open(Path::new(FOLDER)).unwrap();
    let options = LoadOptions { topology, placement, ..LoadOptions::default() };
    let (model, _) = Model::load(gpu, &checkpoint, &options, &mut |_, _| {}).unwrap();
    let open = |name: &&str| Adapter::open(&Path::new(FOLDER).join("adapters").join(name), model.config()).unwrap();
    let adapters = ADAPTERS.iter().map(open).collect();
    (model, adapters)
}

/// What rank 0 does.
fn serve(engine: &mut Engine) -> Result<Vec<Answer>> {
    let ids: Vec<_> = REQUESTS
        .iter()
        .map(|(prompt, max_tokens, adapter)| {
            let adapter = adapter.map(|name| engine.adapter(name).unwrap());
            let request = Request {
                prompt: prompt.to_vec(),
                adapter,
                max_tokens: *max_tokens,
                logits: true,
                ..Request::default()
            };
            engine.submit(request)
        })
        .collect::<Result<_>>()?;
    let mut answers: BTreeMap<_, Answer> = ids.iter().map(|id| (*id, Answer::default())).collect();
    while !engine.is_idle() {
        engine.begin_step()?;
        for event in engine.wait()? {
            match event {
                Event::Logits { sequence, rows, .. } => {
                    answers.get_mut(&sequence).unwrap().0.extend(rows.chunks(256).flat_map(log_softmax));
                }
                Event::Token { sequence, id } => answers.get_mut(&sequence).unwrap().1.push(id),
                Event::Finished { .. } => {}
                Event::Failed { error, .. } => return Err(error),
            }
        }
    }
    Ok(ids.iter().map(|id| answers.remove(id).unwrap()).collect())
}

fn log_softmax(row: &[f32]) -> Vec<f32> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f32 = row.iter().map(|v| (v - max).exp()).sum();
    row.iter().map(|v| v - max - sum.ln()).collect()
}

fn one_rank(gpu: &Gpu) -> Vec<Answer> {
    let (model, adapters) = load(gpu, Topology::default(), PlacementRule::Linear);
    let mut engine = Engine::new(gpu, model, options()).unwrap();
    for (name, adapter) in ADAPTERS.iter().zip(&adapters) {
        engine.load_adapter(name, adapter).unwrap();
    }
    serve(&mut engine).unwrap()
}

/// Runs every rank in a thread of its own and returns what each says: answers from rank 0, nothing from the others.
fn on_ranks(gpu: &Gpu, tp: usize, ep: usize, rule: &PlacementRule, broken: Option<usize>) -> Vec<Result<Vec<Answer>>> {
    let rank = |line: Local| {
        let rank = line.rank();
        let topology = Topology::new(Some(tp), Some(ep), rank).unwrap();
        // A rank that was given another placement than the others.
        let rule = if broken == Some(rank) { &PlacementRule::RoundRobin } else { rule };
        let (model, adapters) = load(gpu, topology, rule.clone());
        if rank == 0 {
            let mut engine = Engine::with_ranks(gpu, model, options(), Box::new(line))?;
            for (name, adapter) in ADAPTERS.iter().zip(&adapters) {
                engine.load_adapter(name, adapter)?;
            }
            let answers = serve(&mut engine)?;
            engine.end()?;
            return Ok(answers);
        }
        let mut worker = Worker::new(gpu, model, Box::new(line))?;
        for (name, adapter) in ADAPTERS.iter().zip(&adapters) {
            worker.load_adapter(name, adapter)?;
        }
        worker.run().map(|()| Vec::new())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = Local::lines(tp).into_iter().map(|line| scope.spawn(|| rank(line))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Every expert on one group, some on more.
fn copies(groups: usize) -> PlacementRule {
    PlacementRule::Table((0..EXPERTS).map(|e| (0..1 + e % groups).map(|i| (e * 3 + i) % groups).collect()).collect())
}

#[test]
fn several_ranks_answer_as_one_does() {
    // The highest tier of f32 arithmetic, and the matrix tier where there is one.
    let tiers = device::every_tier();
    let last = |matrix: bool| tiers.iter().rfind(|gpu| gpu.capabilities().matrix == matrix);
    for gpu in [last(false), last(true)].into_iter().flatten() {
        answer_as_one(gpu);
    }
}

fn answer_as_one(gpu: &Gpu) {
    let expected = one_rank(gpu);
    // f16 operands are rounded anew on every rank, which a close call of ids may show.
    let matrix = gpu.capabilities().matrix;
    let allowed = if matrix { common::TOL_MATRIX_LOGITS } else { 1e-4 };
    let worlds = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 2), (3, 3)];
    let cases: Vec<_> = worlds
        .into_iter()
        .flat_map(|(tp, ep)| [PlacementRule::Linear, PlacementRule::RoundRobin, copies(ep)].map(|rule| (tp, ep, rule)))
        .collect();
    each_case(&cases, |(tp, ep, rule)| {
        let mut all = on_ranks(gpu, *tp, *ep, rule, None);
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

#[test]
fn ranks_that_were_given_different_placements_find_out() {
    let Some(gpu) = device::every_tier().into_iter().next() else { return };
    for (rank, result) in on_ranks(&gpu, 3, 3, &PlacementRule::Linear, Some(1)).into_iter().enumerate() {
        let error = result.map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Rank, "rank {rank}: {error}");
        assert!(error.to_string().contains("placement RoundRobin"), "rank {rank}: {error}");
    }
}

#[test]
fn a_share_of_a_model_is_no_model_for_one_rank() {
    let Some(gpu) = device::every_tier().into_iter().next() else { return };
    let (model, _) = load(&gpu, Topology::new(None, Some(2), 0).unwrap(), PlacementRule::Linear);
    let error = Engine::new(&gpu, model, options()).map(|_| ()).unwrap_err();
    assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains("2 ranks"), "{error}");
}
