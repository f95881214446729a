//! Decides what a load needs before anything is touched: whether it fits, and how large each site's buffer becomes. The budget is
//! one for all sites: each takes of it what its factors need, so that it holds as many adapters as their bytes allow.

/// One site of one layer as it would be once others have been evicted. Sizes are in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SiteRoom {
    /// Size of the buffer.
    pub capacity: u64,
    /// What stays in it.
    pub live: u64,
    /// What comes.
    pub new: u64,
    /// One free range takes what comes, so that the buffer can stay.
    pub in_place: bool,
}

/// What bounds the pool, in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// Buffer of one site.
    pub site: u64,
    /// Buffers of all sites.
    pub budget: Option<u64>,
}

/// Why something does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The `live` words of a site and the `new` ones are more than one buffer may have. `site` counts through all layers.
    Site { site: usize, live: u64, new: u64 },
    /// The `live` words of all sites and the `new` ones are more than the budget.
    Budget { live: u64, new: u64 },
}

/// The capacity of every site after the load; one that differs, or is not `in_place`, means a new buffer, into which
/// what stays is moved without gaps. With `slack` a buffer at least doubles, so that loading n adapters copies O(n)
/// factors; without it, it takes what it needs. Buffers of other sites shrink only where the budget demands it.
pub(crate) fn capacities(sites: &[SiteRoom], bounds: Bounds, slack: bool) -> Result<Vec<u64>, Refusal> {
    let needed = |room: &SiteRoom| room.live + room.new;
    if let Some(site) = sites.iter().position(|room| needed(room) > bounds.site) {
        let SiteRoom { live, new, .. } = sites[site];
        return Err(Refusal::Site { site, live, new });
    }
    let exact = |room: &SiteRoom| if room.in_place { room.capacity } else { needed(room) };
    let grown = |room: &SiteRoom| {
        if room.in_place { room.capacity } else { needed(room).max(2 * room.capacity).min(bounds.site) }
    };
    let mut all: Vec<u64> = if slack { sites.iter().map(grown).collect() } else { sites.iter().map(exact).collect() };
    let Some(budget) = bounds.budget else { return Ok(all) };
    let (live, new) = sites.iter().fold((0, 0), |(live, new), room| (live + room.live, new + room.new));
    if live + new > budget {
        return Err(Refusal::Budget { live, new });
    }
    if all.iter().sum::<u64>() > budget {
        all = sites.iter().map(exact).collect();
    }
    // The largest gaps first, so that few buffers are replaced.
    let mut by_gap: Vec<usize> = (0..sites.len()).collect();
    by_gap.sort_by_key(|&i| std::cmp::Reverse(all[i] - needed(&sites[i])));
    let mut total: u64 = all.iter().sum();
    for i in by_gap {
        if total <= budget {
            break;
        }
        total -= all[i] - needed(&sites[i]);
        all[i] = needed(&sites[i]);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Arc;

    use super::*;
    use crate::adapter::free_list::FreeList;
    use crate::adapter::image::{Image, WORD};
    use crate::adapter::sites::{LayerSites, PoolSites};
    use crate::adapter::{Adapter, Factor, Matrix, Site};
    use crate::checkpoint::MlpKind;
    use crate::dtype::DType;
    use crate::placement::{ExpertShare, RankShare};
    use crate::plan::memory::tests::qwen3_30b;

    type Case<'a> = (&'a str, &'a [SiteRoom], Bounds, bool, Result<Vec<u64>, Refusal>);

    const fn room(capacity: u64, live: u64, new: u64, in_place: bool) -> SiteRoom {
        SiteRoom { capacity, live, new, in_place }
    }

    #[test]
    fn buffers_grow_with_slack_shrink_for_the_budget_and_never_pass_a_bound() {
        let bounds = |site, budget| Bounds { site, budget };
        let two = [room(10, 8, 4, false), room(100, 6, 4, true)];
        let cases: [Case<'_>; 8] = [
            ("doubles", &two, bounds(1000, None), true, Ok(vec![20, 100])),
            ("takes what it needs", &two, bounds(1000, None), false, Ok(vec![12, 100])),
            ("doubles up to the limit", &two, bounds(15, None), true, Ok(vec![15, 100])),
            ("the budget has room for the slack", &two, bounds(1000, Some(120)), true, Ok(vec![20, 100])),
            ("the budget has room for what is needed", &two, bounds(1000, Some(115)), true, Ok(vec![12, 100])),
            ("another site shrinks", &two, bounds(1000, Some(22)), true, Ok(vec![12, 10])),
            ("one word is missing", &two, bounds(1000, Some(21)), true, Err(Refusal::Budget { live: 14, new: 8 })),
            ("a site is too large", &two, bounds(11, Some(1)), true, Err(Refusal::Site { site: 0, live: 8, new: 4 })),
        ];
        let failed: Vec<_> = cases
            .iter()
            .filter(|(_, sites, bounds, slack, expected)| capacities(sites, *bounds, *slack) != *expected)
            .map(|(name, sites, bounds, slack, _)| (name, capacities(sites, *bounds, *slack)))
            .collect();
        assert!(failed.is_empty(), "{failed:?}");
    }

    /// What a pool knows of the sites of one layer, without their buffers.
    struct Layer {
        words: Vec<u64>,
        rooms: Vec<SiteRoom>,
        free: Vec<FreeList>,
    }

    impl Layer {
        /// `words`: of each site, for one adapter.
        fn new(words: &[u64]) -> Self {
            let rooms = words.iter().map(|new| room(0, 0, *new, false)).collect();
            Self { words: words.to_vec(), rooms, free: vec![FreeList::default(); words.len()] }
        }

        /// Loads one more.
        fn load(&mut self, bounds: Bounds) -> Result<(), Refusal> {
            for ((room, free), words) in self.rooms.iter_mut().zip(&self.free).zip(&self.words) {
                room.in_place = free.clone().take(*words).is_some();
            }
            let sizes = capacities(&self.rooms, bounds, true)?;
            for (((room, free), size), words) in self.rooms.iter_mut().zip(&mut self.free).zip(sizes).zip(&self.words) {
                if !room.in_place || size != room.capacity {
                    (room.capacity, *free) = (size, FreeList::default());
                    free.give(room.live, size - room.live);
                }
                free.take(*words).unwrap();
                room.live += words;
            }
            Ok(())
        }

        /// How many can be loaded, up to `most`.
        fn holds(mut self, bounds: Bounds, most: usize) -> usize {
            let n = (0..most).take_while(|_| self.load(bounds).is_ok()).count();
            let largest = self.rooms.iter().map(|room| room.capacity).max().unwrap();
            let all: u64 = self.rooms.iter().map(|room| room.capacity).sum();
            assert!(largest <= bounds.site && bounds.budget.is_none_or(|budget| all <= budget));
            n
        }
    }

    #[test]
    fn a_layer_of_qwen3_30b_holds_64_adapters_of_rank_16_in_bindings_of_2_gib() {
        let config = qwen3_30b();
        let share = RankShare::of_experts(&config, ExpertShare::whole(128, 768).unwrap());
        let layer = LayerSites::new(&config, MlpKind::Experts, &share, 64);
        let sites = PoolSites::Layer(Box::new(layer), Some(share.experts));
        let (rank, mut factors) = (16, Vec::new());
        let attention = [(Site::Q, 4096, 2048), (Site::K, 512, 2048), (Site::V, 512, 2048), (Site::O, 2048, 4096)];
        let of_expert = [(Site::ExpertGate, 768, 2048), (Site::ExpertUp, 768, 2048), (Site::ExpertDown, 2048, 768)];
        let experts = (0..128).flat_map(|expert| of_expert.map(|shape| (expert, shape)));
        for (expert, (site, out, input)) in attention.map(|shape| (0, shape)).into_iter().chain(experts) {
            let matrix = |rows, cols| {
                let bytes = vec![0; rows * cols * 2];
                Arc::new(Matrix { dtype: DType::Bf16, rows, cols, bytes })
            };
            let (a, b) = (matrix(rank, input), matrix(out, rank));
            factors.push(Factor { layer: 0, site, expert, rank, scale: 1.0, a, b, bias: None });
        }
        factors.sort_by_key(Factor::place);
        let adapter = Adapter { path: PathBuf::new(), factors, bytes_read: 0, share: None };
        let words: Vec<u64> = Image::of_layer(&sites, 0, &adapter).iter().map(|image| image.words).collect();

        let bytes = |n: u64| words.iter().map(|words| n * words * WORD).collect::<Vec<_>>();
        assert_eq!(
            sites.runs().iter().map(|run| run.name).collect::<Vec<_>>(),
            ["qkv", "o", "router", "gate_up", "down"]
        );
        assert_eq!(bytes(64), [23_068_672, 12_582_912, 0, 1_476_395_008, 738_197_504]);
        // One binding for the layer is too small.
        let limit = (1u64 << 31) - 4;
        assert!(bytes(64).iter().sum::<u64>() > limit);
        let bounds = |budget| Bounds { site: limit / WORD, budget };
        assert_eq!(Layer::new(&words).holds(bounds(None), 64), 64);
        // Then gate and up are full.
        let mut layer = Layer::new(&words);
        let refused = (0..100).find_map(|n| layer.load(bounds(None)).err().map(|refusal| (n, refusal)));
        assert_eq!(refused, Some((93, Refusal::Site { site: 3, live: 93 * words[3], new: words[3] })));
        // A budget for 64 holds 64, whatever part of it each site needs.
        let budget = 64 * words.iter().sum::<u64>();
        assert_eq!(Layer::new(&words).holds(bounds(Some(budget)), 100), 64);
        assert_eq!(Layer::new(&words).holds(bounds(Some(budget - 1)), 100), 63);
    }
}
