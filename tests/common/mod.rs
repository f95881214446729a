//! What the kernel tests share: a deterministic generator, routings, adapter mixes, prefills and tolerances.
#![allow(dead_code, reason = "each test binary uses a part of it")]

/// A stage of the f32 tiers against the oracle.
pub const TOL_F32: f32 = 1e-4;
/// Logits of standard deviation about 1 on the f32 tiers.
pub const TOL_LOGITS: f32 = 1e-3;
/// A stage of the matrix tier (f16 operands), relative.
pub const TOL_MATRIX: f32 = 2e-3;
/// Logits on the matrix tier.
pub const TOL_MATRIX_LOGITS: f32 = 5e-2;
/// Ids of a route whose keys are computed in f32 are owed where the oracle's gap exceeds this.
pub const ROUTE_GAP: f32 = 1e-5;

/// What a stage's result may be off by on the tier of this device.
pub fn tolerance(gpu: &wgmoe::Gpu) -> f32 {
    if gpu.capabilities().matrix { TOL_MATRIX } else { TOL_F32 }
}

/// What logits of standard deviation about 1 may be off by on it.
pub fn logit_tolerance(gpu: &wgmoe::Gpu) -> f32 {
    if gpu.capabilities().matrix { TOL_MATRIX_LOGITS } else { TOL_LOGITS }
}

/// Prefill of float outputs: an unwritten element fails every comparison.
pub const UNWRITTEN_F32: f32 = f32::NAN;
/// Prefill of integer outputs: not the sentinel, and out of range everywhere.
pub const UNWRITTEN_I32: i32 = 0x7fff_ffff;

/// Largest difference over the largest magnitude of `expected`; +inf for a NaN or another length.
pub fn rel_err(got: &[f32], expected: &[f32]) -> f32 {
    if got.len() != expected.len() {
        return f32::INFINITY;
    }
    let mut largest = 0f32;
    let mut worst = 0f32;
    for i in 0..got.len() {
        let difference = (got[i] - expected[i]).abs();
        if difference.is_nan() {
            return f32::INFINITY;
        }
        largest = largest.max(expected[i].abs());
        worst = worst.max(difference);
    }
    if worst == 0.0 { 0.0 } else { worst / largest }
}

/// For each product on cooperative matrices among the labels of what was recorded, whether it adds adapters itself. The router's, which
/// multiplies twice, does not count.
pub fn folds(labels: &[String]) -> Vec<bool> {
    let products = labels
        .iter()
        .filter(|label| ["expert_gemm_matrix[", "expert_gemm_direct["].iter().any(|stem| label.starts_with(stem)));
    let has = |label: &String, word: &str| label.split([' ', ']']).any(|own| own == word);
    products.filter(|label| !has(label, "twice")).map(|label| has(label, "lora")).collect()
}

/// Which stages shrink rows to the rank of adapters, by the labels of what was recorded.
pub fn shrinks(labels: &[String]) -> Vec<&str> {
    labels.iter().filter_map(|label| label.split('[').next()).filter(|stem| stem.contains("shrink")).collect()
}

/// splitmix64 (Steele, Lea, Flood 2014): one u64 of state, the same stream on every machine.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in 0..1.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in 0..n.
    pub fn below(&mut self, n: usize) -> usize {
        ((self.unit() * n as f64) as usize).min(n - 1)
    }

    /// Uniform in -1..1: `n` values.
    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| (self.unit() * 2.0 - 1.0) as f32).collect()
    }

    /// An index drawn with probability proportional to its weight.
    pub fn weighted(&mut self, weights: &[f64]) -> usize {
        let mut rest = self.unit() * weights.iter().sum::<f64>();
        let mut last = 0;
        for (i, weight) in weights.iter().enumerate() {
            if *weight == 0.0 {
                continue;
            }
            last = i;
            if rest < *weight {
                break;
            }
            rest -= weight;
        }
        last
    }
}

/// How tokens choose experts. A token never names an expert twice.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Routing {
    /// Every token takes experts 0..A.
    Identical,
    /// Consecutive pairs take consecutive experts, modulo E.
    Distinct,
    /// Each expert is as likely as any other.
    Uniform,
    /// Expert e with weight (e + 1)^-exponent.
    Zipf(f64),
    /// Expert 0 gets nine tenths of the first choices.
    Skewed,
    /// Uniform over all but the middle expert.
    EmptyExpert,
}

impl Routing {
    pub const ALL: [Self; 6] =
        [Self::Identical, Self::Distinct, Self::Uniform, Self::Zipf(1.5), Self::Skewed, Self::EmptyExpert];

    /// `topk_ids`: `[T, A]`; A <= E, and A < E for `EmptyExpert`.
    pub fn ids(self, tokens: usize, top_k: usize, experts: usize, rng: &mut Rng) -> Vec<i32> {
        let mut ids = Vec::with_capacity(tokens * top_k);
        for t in 0..tokens {
            let mut weights = self.weights(experts);
            for k in 0..top_k {
                let e = match self {
                    Self::Identical => k,
                    Self::Distinct => (t * top_k + k) % experts,
                    _ => rng.weighted(&weights),
                };
                weights[e] = 0.0;
                ids.push(i32::try_from(e).unwrap());
            }
        }
        ids
    }

    fn weights(self, experts: usize) -> Vec<f64> {
        let mut weights = vec![1.0; experts];
        match self {
            Self::Zipf(exponent) => {
                for (e, weight) in weights.iter_mut().enumerate() {
                    *weight = ((e + 1) as f64).powf(-exponent);
                }
            }
            Self::Skewed => weights[0] = 9.0 * (experts - 1).max(1) as f64,
            Self::EmptyExpert => weights[experts / 2] = 0.0,
            Self::Identical | Self::Distinct | Self::Uniform => {}
        }
        weights
    }
}

/// How tokens choose adapter slots.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum AdapterMix {
    /// No token has an adapter.
    None,
    /// Every token uses slot 0.
    Identical,
    /// Consecutive tokens use consecutive slots, modulo L.
    Distinct,
    /// Each slot and no adapter are equally likely.
    Uniform,
    /// Slot s with weight (s + 1)^-exponent.
    Zipf(f64),
    /// Slot 0 for nine tokens of ten, the rest spread over the others.
    Skewed,
}

impl AdapterMix {
    pub const ALL: [Self; 6] =
        [Self::None, Self::Identical, Self::Distinct, Self::Uniform, Self::Zipf(1.5), Self::Skewed];

    /// `token_lora_mapping`: `[T]`.
    pub fn mapping(self, tokens: usize, slots: usize, rng: &mut Rng) -> Vec<i32> {
        let mut mapping = Vec::with_capacity(tokens);
        for t in 0..tokens {
            let slot = match self {
                Self::None => None,
                Self::Identical => Some(0),
                Self::Distinct => Some(t % slots),
                Self::Uniform => rng.below(slots + 1).checked_sub(1),
                Self::Zipf(exponent) => Some(rng.weighted(&Routing::Zipf(exponent).weights(slots))),
                Self::Skewed => Some(rng.weighted(&Routing::Skewed.weights(slots))),
            };
            mapping.push(slot.map_or(-1, |s| i32::try_from(s).unwrap()));
        }
        mapping
    }
}

/// Runs every case and reports all that fail, not the first.
pub fn each_case<C: std::fmt::Debug>(cases: &[C], check: impl Fn(&C) -> Result<(), String>) {
    let mut failures = Vec::new();
    for case in cases {
        if let Err(why) = check(case) {
            failures.push(format!("{case:?}: {why}"));
        }
    }
    assert!(failures.is_empty(), "{} of {} cases failed\n{}", failures.len(), cases.len(), failures.join("\n"));
}
