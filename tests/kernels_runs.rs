//! Pairs sorted by expert and adapter on the device, exact against the oracle on every tier.

mod common;
#[path = "common/device.rs"]
mod device;
#[path = "common/gpu_run.rs"]
mod gpu_run;

use common::{AdapterMix, Rng, Routing, UNWRITTEN_I32};
use gpu_run::{Output, read, run, upload};
use proptest::prelude::*;
use wgmoe::Gpu;
use wgmoe::kernels::align::Aligned as Place;
use wgmoe::kernels::runs::{AlignRuns, Runs as At, TokenChunks};
use wgmoe::plan::capabilities::Capabilities;
use wgmoe::reference::{self, Aligned, Runs};
use wgmoe::router::{STATUS_ID, STATUS_SLOT};
use wgmoe::shape::align_capacity;

/// Column tiles of consumers of tiles, and of runs.
const COLUMNS: [&[u32]; 2] = [&[3, 5], &[1, 3, 7]];

#[derive(Debug, Clone)]
struct Case {
    /// `None`: pairs are whole tokens.
    ids: Option<Vec<i32>>,
    mapping: Vec<i32>,
    top_k: usize,
    experts: usize,
    slots: usize,
    used: Vec<usize>,
    tile: usize,
    run: usize,
}

impl Case {
    fn pairs(&self) -> usize {
        self.mapping.len() * self.top_k
    }

    fn expected(&self) -> Runs {
        let ids = self.ids.clone().unwrap_or(vec![0; self.pairs()]);
        let (counts, sizes) = ([self.experts, self.slots], [self.tile, self.run]);
        reference::align_runs(&ids, &self.mapping, self.top_k, counts, sizes, COLUMNS)
    }
}

/// What the device makes of a case, and its status.
fn runs_on(gpu: &Gpu, case: &Case) -> (Runs, u32) {
    let pairs = case.pairs();
    let mapping = upload(gpu, &case.mapping);
    let ids = case.ids.as_ref().map(|ids| upload(gpu, ids));
    let status = Output::new(gpu, 1, 0u32);
    let capacity = align_capacity(pairs, case.experts, case.tile);
    let runs = align_capacity(pairs, case.experts * case.slots, case.run) / case.run;
    let words = 1024 + capacity * 2 + pairs + 4 * runs;
    let (at, out): (At, _) = run(gpu, |rec, pass| {
        // Larger than needed, and full of words that are neither padding nor a label.
        let out = rec.scratch("tiles", words as u64 * 4)?;
        gpu.queue().write_buffer(&out.buffer, 0, bytemuck::cast_slice(&vec![UNWRITTEN_I32; words]));
        let (tokens, slots) = ((case.mapping.len(), &mapping), (case.slots, &*case.used));
        let align = AlignRuns {
            chunks: &TokenChunks::record(rec, pass, "chunks", tokens, slots)?,
            top_k: case.top_k,
            experts: case.experts,
            tile: case.tile,
            label: "tiles",
            ids: ids.as_ref(),
            status: &status.view,
            run: case.run,
            columns: COLUMNS[0],
            run_columns: COLUMNS[1],
        };
        Ok((align.record(rec, pass)?, out))
    });
    let words: Vec<i32> = read(gpu, &out, words);
    let range = |base: u32, n: usize| words[base as usize..base as usize + n].to_vec();
    let aligned = &at.aligned;
    assert_eq!((aligned.capacity, aligned.tile, at.most), (capacity, case.tile, case.run));
    let sorted = range(aligned.sorted_base, capacity);
    let stands = |(p, place): (usize, &i32)| sorted[*place as usize] == p as i32;
    let places = range(aligned.places_base, pairs);
    assert!(places.iter().enumerate().all(stands), "a pair does not stand in its place");
    let n = words[At::COUNT_WORD] as usize;
    let runs: Vec<[i32; 3]> = range(at.base, n * 4).chunks(4).map(|run| [run[0], run[1], run[2]]).collect();
    assert!(words[at.base as usize + n * 4..].iter().all(|w| *w == UNWRITTEN_I32), "written past the runs");
    let arguments = |c: usize| [0, 1, 2].map(|i| words[c * 4 + i] as u32);
    let tiles = COLUMNS[0].len();
    let aligned = Aligned {
        sorted_token_ids: sorted,
        expert_ids: range(aligned.expert_base, capacity / case.tile),
        num_tokens_post_padded: words[Place::COUNT_WORD] as u32,
        dispatch: (0..tiles).map(arguments).collect(),
    };
    let dispatch = (tiles..tiles + COLUMNS[1].len()).map(arguments).collect();
    (Runs { aligned, runs, dispatch }, status.read(gpu)[0])
}

/// Compares all that is written with the oracle's, and returns the status.
fn check(gpu: &Gpu, case: &Case) -> Result<u32, String> {
    let ((got, status), expected) = (runs_on(gpu, case), case.expected());
    let same = [
        ("labels", got.aligned.expert_ids == expected.aligned.expert_ids),
        ("pairs", got.aligned.sorted_token_ids == expected.aligned.sorted_token_ids),
        ("runs", got.runs == expected.runs),
        ("count or dispatch", got == expected),
    ];
    match same.iter().find(|(_, same)| !same) {
        None => Ok(status),
        Some((what, _)) => Err(format!("{what}: {} P {} {case:?}", gpu.tier(), case.pairs())),
    }
}

/// Slots of `mapping` that an adapter may be in.
fn used(mapping: &[i32], slots: usize) -> Vec<usize> {
    let mut used: Vec<usize> = mapping.iter().filter_map(|s| usize::try_from(*s).ok()).filter(|s| *s < slots).collect();
    used.sort_unstable();
    used.dedup();
    used
}

fn case(routing: Routing, mix: AdapterMix, [tokens, top_k, experts, slots]: [usize; 4], sizes: [usize; 2]) -> Case {
    let mut rng = Rng::new(31);
    let mut ids = routing.ids(tokens, top_k, experts, &mut rng);
    ids.iter_mut().step_by(13).for_each(|id| *id = -1);
    let mapping = mix.mapping(tokens, slots, &mut rng);
    let (used, [tile, run]) = (used(&mapping, slots), sizes);
    Case { ids: Some(ids), mapping, top_k, experts, slots, used, tile, run }
}

#[test]
fn pairs_are_sorted_by_expert_and_adapter_as_the_oracle_sorts_them() {
    for gpu in device::every_tier() {
        for sizes in [[1, 1], [16, 16], [80, 16], [128, 64], [5, 3]] {
            for (tokens, top_k, experts, slots) in
                [(0, 1, 1, 1), (1, 2, 3, 2), (60, 2, 3, 3), (90, 4, 7, 40), (600, 3, 33, 9), (1100, 8, 128, 8)]
            {
                let case = case(Routing::Uniform, AdapterMix::Uniform, [tokens, top_k, experts, slots], sizes);
                assert_eq!(check(&gpu, &case), Ok(0));
            }
        }
        for routing in Routing::ALL {
            for mix in AdapterMix::ALL {
                assert_eq!(check(&gpu, &case(routing, mix, [75, 4, 16, 6], [48, 16])), Ok(0));
            }
        }
    }
}

#[test]
fn whole_tokens_are_sorted_by_adapter_alone() {
    for gpu in device::every_tier() {
        for mix in AdapterMix::ALL {
            for (tokens, slots) in [(0, 1), (1, 1), (70, 3), (700, 130)] {
                let case = Case { ids: None, ..case(Routing::Uniform, mix, [tokens, 1, 1, slots], [16, 64]) };
                assert_eq!(check(&gpu, &case), Ok(0));
            }
        }
    }
}

#[test]
fn slots_that_there_are_no_bits_for_are_all_counted() {
    for gpu in device::every_tier() {
        let mut case = case(Routing::Uniform, AdapterMix::Uniform, [40, 2, 3, 600], [16, 16]);
        case.mapping.iter_mut().step_by(3).for_each(|slot| *slot = 599);
        case.used = used(&case.mapping, 600);
        assert_eq!(check(&gpu, &case), Ok(0));
        case.used.clear();
        assert_eq!(check(&gpu, &case), Ok(0));
    }
}

#[test]
fn many_adapters_have_chunks_of_their_own_which_few_workgroups_place() {
    for gpu in device::every_tier() {
        let mut case = case(Routing::Uniform, AdapterMix::Uniform, [600, 3, 33, 400], [16, 16]);
        // More chunks than workgroups, and a slot whose chunks several workgroups share.
        case.mapping.iter_mut().take(350).enumerate().for_each(|(token, slot)| *slot = (token % 300) as i32);
        case.mapping.iter_mut().skip(350).for_each(|slot| *slot = 77);
        case.used = used(&case.mapping, 400);
        assert_eq!(check(&gpu, &case), Ok(0));
        let mut wrong = case.clone();
        *wrong.mapping.last_mut().unwrap() = 400;
        assert_eq!(check(&gpu, &wrong), Ok(STATUS_SLOT));
    }
}

#[test]
fn a_large_step_with_hundreds_of_slots_and_experts_fits_the_smallest_binding() {
    // What every device has.
    const BYTES: u64 = 128 << 20;
    for gpu in device::every_tier().iter().filter(|gpu| gpu.capabilities().max_binding_bytes >= BYTES) {
        let own = gpu.capabilities().clone();
        let gpu = gpu.with_capabilities(Capabilities { max_binding_bytes: BYTES, ..own });
        let mut case = case(Routing::Distinct, AdapterMix::Distinct, [16_384, 1, 512, 1024], [16, 16]);
        case.mapping.iter_mut().step_by(7).for_each(|slot| *slot = 3);
        assert_eq!(check(&gpu, &case), Ok(0));
    }
}

#[test]
fn what_is_no_slot_or_no_expert_sets_the_status_and_counts_as_none() {
    for gpu in device::every_tier() {
        let good = case(Routing::Uniform, AdapterMix::Uniform, [50, 2, 5, 4], [16, 16]);
        let mut slot = good.clone();
        slot.mapping[7] = 4;
        slot.mapping[9] = i32::MAX;
        assert_eq!(check(&gpu, &slot), Ok(STATUS_SLOT));
        let mut expert = good.clone();
        let ids = expert.ids.as_mut().unwrap();
        (ids[3], ids[40], ids[41]) = (5, i32::MAX, i32::MIN);
        assert_eq!(check(&gpu, &expert), Ok(STATUS_ID));
        // A slot that the batch was said not to have is none as well.
        let mut unsaid = good;
        unsaid.mapping.iter_mut().step_by(4).for_each(|slot| *slot = 2);
        unsaid.used = vec![0, 1, 3];
        let (got, status) = runs_on(&gpu, &unsaid);
        let none = Case { mapping: unsaid.mapping.iter().map(|s| if *s == 2 { -1 } else { *s }).collect(), ..unsaid };
        assert_eq!((got, status), (none.expected(), 0));
    }
}

#[test]
fn any_ids_and_slots_are_sorted_as_the_oracle_does() {
    let gpus = device::every_tier();
    let ids = prop_oneof![8 => 0..20i32, 1 => any::<i32>(), 1 => Just(-1)];
    let slots = prop_oneof![8 => 0..9i32, 1 => any::<i32>(), 1 => Just(-1)];
    let rows = prop::collection::vec((slots, prop::collection::vec(ids, 3)), 0..130);
    let strategy = (rows, 1..20usize, 1..9usize, 1..17usize, 1..17usize);
    proptest!(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() },
    |((rows, experts, slots, tile, run) in strategy)| {
        let mapping: Vec<i32> = rows.iter().map(|(slot, _)| *slot).collect();
        let ids = rows.iter().flat_map(|(_, ids)| ids).copied().collect();
        let used = used(&mapping, slots);
        let case = Case { ids: Some(ids), mapping, top_k: 3, experts, slots, used, tile, run };
        for gpu in &gpus {
            prop_assert!(check(gpu, &case).is_ok());
        }
    });
}
