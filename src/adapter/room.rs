//! Decides what a load needs before anything is touched: whether it fits, and how large each layer's buffer becomes.

/// One layer as it would be once others have been evicted. Sizes are in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LayerRoom {
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
    /// Buffer of one layer.
    pub layer: u64,
    /// Buffers of all layers.
    pub budget: Option<u64>,
}

/// Why something does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// A layer's `live` words and the `new` ones are more than one buffer may have.
    Layer { layer: usize, live: u64, new: u64 },
    /// The `live` words of all layers and the `new` ones are more than the budget.
    Budget { live: u64, new: u64 },
}

/// The capacity of every layer after the load; one that differs, or is not `in_place`, means a new buffer, into which
/// what stays is moved without gaps. With `slack` a buffer at least doubles, so that loading n adapters copies O(n)
/// factors; without it, it takes what it needs. Buffers of other layers shrink only where the budget demands it.
pub(crate) fn capacities(layers: &[LayerRoom], bounds: Bounds, slack: bool) -> Result<Vec<u64>, Refusal> {
    let needed = |room: &LayerRoom| room.live + room.new;
    if let Some(layer) = layers.iter().position(|room| needed(room) > bounds.layer) {
        let LayerRoom { live, new, .. } = layers[layer];
        return Err(Refusal::Layer { layer, live, new });
    }
    let exact = |room: &LayerRoom| if room.in_place { room.capacity } else { needed(room) };
    let grown = |room: &LayerRoom| {
        if room.in_place { room.capacity } else { needed(room).max(2 * room.capacity).min(bounds.layer) }
    };
    let mut all: Vec<u64> = if slack { layers.iter().map(grown).collect() } else { layers.iter().map(exact).collect() };
    let Some(budget) = bounds.budget else { return Ok(all) };
    let (live, new) = layers.iter().fold((0, 0), |(live, new), room| (live + room.live, new + room.new));
    if live + new > budget {
        return Err(Refusal::Budget { live, new });
    }
    if all.iter().sum::<u64>() > budget {
        all = layers.iter().map(exact).collect();
    }
    // The largest gaps first, so that few buffers are replaced.
    let mut by_gap: Vec<usize> = (0..layers.len()).collect();
    by_gap.sort_by_key(|&i| std::cmp::Reverse(all[i] - needed(&layers[i])));
    let mut total: u64 = all.iter().sum();
    for i in by_gap {
        if total <= budget {
            break;
        }
        total -= all[i] - needed(&layers[i]);
        all[i] = needed(&layers[i]);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    type Case<'a> = (&'a str, &'a [LayerRoom], Bounds, bool, Result<Vec<u64>, Refusal>);

    const fn room(capacity: u64, live: u64, new: u64, in_place: bool) -> LayerRoom {
        LayerRoom { capacity, live, new, in_place }
    }

    #[test]
    fn buffers_grow_with_slack_shrink_for_the_budget_and_never_pass_a_bound() {
        let bounds = |layer, budget| Bounds { layer, budget };
        let two = [room(10, 8, 4, false), room(100, 6, 4, true)];
        let cases: [Case<'_>; 8] = [
            ("doubles", &two, bounds(1000, None), true, Ok(vec![20, 100])),
            ("takes what it needs", &two, bounds(1000, None), false, Ok(vec![12, 100])),
            ("doubles up to the limit", &two, bounds(15, None), true, Ok(vec![15, 100])),
            ("the budget has room for the slack", &two, bounds(1000, Some(120)), true, Ok(vec![20, 100])),
            ("the budget has room for what is needed", &two, bounds(1000, Some(115)), true, Ok(vec![12, 100])),
            ("another layer shrinks", &two, bounds(1000, Some(22)), true, Ok(vec![12, 10])),
            ("one word is missing", &two, bounds(1000, Some(21)), true, Err(Refusal::Budget { live: 14, new: 8 })),
            (
                "a layer is too large",
                &two,
                bounds(11, Some(1)),
                true,
                Err(Refusal::Layer { layer: 0, live: 8, new: 4 }),
            ),
        ];
        let failed: Vec<_> = cases
            .iter()
            .filter(|(_, layers, bounds, slack, expected)| capacities(layers, *bounds, *slack) != *expected)
            .map(|(name, layers, bounds, slack, _)| (name, capacities(layers, *bounds, *slack)))
            .collect();
        assert!(failed.is_empty(), "{failed:?}");
    }
}
