//! Shadow trials: what candidates would keep of the gradients that are there anyway.
//!
//! Each candidate has an error feedback of its own over one fixed random subset of the coordinates and is fed every
//! step. Training is not touched. A live trial of a few iterations starts each candidate from the residual of
//! whatever ran before; what a candidate keeps in the long run shows only once its own residual has grown to its
//! steady size, which at CR c takes about 1/c steps. A shadow has been running for as long as the job.

use crate::{CompressError, Energy, GradientCompressor, Layers, LayersError, Method};
use rand::SeedableRng;
use rand::rngs::SmallRng;

/// Steps that an average remembers: weights fall to 1/e over them.
const HORIZON: f64 = 50.0;

/// Coordinates of a shadow when nothing else is asked for. A candidate of CR 0.001 then keeps 16 of them, and all
/// five default ratios cost less than a compression of 100,000 values.
pub const SHADOW_VALUES: usize = 16_384;

/// Most candidates of a shadow: each takes 8 bytes per coordinate, and time.
pub const MAX_SHADOWS: usize = 32;

/// What a candidate kept of late.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShadowGain {
    /// E‖g_c‖²/E‖g_e‖² over the last steps.
    pub gain: f64,
    /// Steps since its error feedback began empty.
    pub steps: u64,
}

/// The candidates of one rank.
#[derive(Debug)]
pub struct Shadow {
    /// Values of the whole gradient.
    n: usize,
    /// Ascending; empty when every coordinate is looked at.
    indices: Vec<u32>,
    layers: Layers,
    seed: u64,
    gathered: Vec<f32>,
    candidates: Vec<Candidate>,
}

#[derive(Debug)]
struct Candidate {
    method: Method,
    compressor: GradientCompressor,
    recent: Energy,
    steps: u64,
}

impl Shadow {
    /// Over at most about `values` coordinates of such a gradient, of each layer its share, picked by `seed`.
    pub fn new(layers: &Layers, values: usize, seed: u64) -> Result<Self, LayersError> {
        let n = layers.values();
        if n <= values {
            let (indices, gathered) = (Vec::new(), Vec::new());
            return Ok(Self { n, indices, layers: layers.clone(), seed, gathered, candidates: Vec::new() });
        }
        let mut rng = SmallRng::seed_from_u64(seed);
        let share = values as f64 / n as f64;
        let mut indices = Vec::with_capacity(values + layers.len());
        let mut lengths = Vec::with_capacity(layers.len());
        for range in layers.ranges() {
            let amount = ((range.len() as f64 * share).ceil() as usize).min(range.len());
            let mut picked = rand::seq::index::sample(&mut rng, range.len(), amount).into_vec();
            picked.sort_unstable();
            // Below n, and n is below 2^32.
            indices.extend(picked.iter().map(|i| (range.start + i) as u32));
            lengths.push(amount);
        }
        let layers = Layers::new(&lengths)?;
        Ok(Self { n, gathered: vec![0.0; indices.len()], indices, layers, seed, candidates: Vec::new() })
    }

    /// Starts a candidate, unless it runs already or [`MAX_SHADOWS`] do; answers whether it runs now.
    pub fn add(&mut self, method: Method) -> bool {
        if self.candidates.iter().any(|c| c.method == method) {
            return true;
        }
        let room = self.candidates.len() < MAX_SHADOWS;
        if room {
            let compressor = GradientCompressor::new(self.layers.clone());
            self.candidates.push(Candidate { method, compressor, recent: Energy::default(), steps: 0 });
        }
        room
    }

    /// Feeds a step's gradient (n values, before error feedback) to every candidate. A gradient that is not finite
    /// changes nothing.
    pub fn observe(&mut self, gradient: &[f32]) -> Result<(), CompressError> {
        crate::feedback::check_length("it", self.n, gradient.len())?;
        let gradient = if self.indices.is_empty() {
            gradient
        } else {
            let picked = self.indices.iter().map(|i| gradient[*i as usize]);
            self.gathered.iter_mut().zip(picked).for_each(|(to, from)| *to = from);
            &self.gathered
        };
        for candidate in &mut self.candidates {
            candidate.feed(gradient, self.seed)?;
        }
        Ok(())
    }

    /// What a candidate kept of late; absent before its first step.
    pub fn gain(&self, method: Method) -> Option<ShadowGain> {
        let candidate = self.candidates.iter().find(|c| c.method == method && c.steps > 0)?;
        Some(ShadowGain { gain: candidate.recent.gain(), steps: candidate.steps })
    }
}

impl Candidate {
    fn feed(&mut self, gradient: &[f32], seed: u64) -> Result<(), CompressError> {
        let energy = self.compressor.compress(self.method, gradient, seed ^ self.steps)?.energy;
        self.steps += 1;
        let keep = (-1.0 / HORIZON).exp();
        self.recent = Energy { sent: keep * self.recent.sent, fed: keep * self.recent.fed } + energy;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Compressor;
    use flexcomm_domain::CompressionRatio;
    use rand::Rng;

    fn method(compressor: Compressor, cr: f64) -> Method {
        Method::new(compressor, CompressionRatio::new(cr).unwrap())
    }

    /// A gradient with a constant part and heavy noise: error feedback builds up.
    fn gradient(rng: &mut SmallRng, n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i % 17) as f32 - 8.0) * 0.02 + rng.random_range(-1.0f32..1.0).powi(5)).collect()
    }

    /// Mean gain of the real thing over the last 100 of `steps`.
    fn live(method: Method, layers: &Layers, steps: usize) -> f64 {
        let mut rng = SmallRng::seed_from_u64(1);
        let mut rank = GradientCompressor::new(layers.clone());
        let mut energy = Energy::default();
        for step in 0..steps {
            let gradient = gradient(&mut rng, layers.values());
            let of_step = rank.compress(method, &gradient, 0).unwrap().energy;
            if step + 100 >= steps {
                energy = energy + of_step;
            }
        }
        energy.gain()
    }

    #[test]
    fn a_shadow_finds_the_gain_of_the_long_run_and_a_short_trial_does_not() {
        let layers = Layers::new(&[30_000, 2_000, 28_000]).unwrap();
        for (compressor, cr, steps) in
            [(Compressor::TopK, 0.1, 200), (Compressor::LwTopK, 0.1, 200), (Compressor::TopK, 0.01, 800)]
        {
            let method = method(compressor, cr);
            let mut shadow = Shadow::new(&layers, 6_000, 3).unwrap();
            assert!(shadow.add(method) && shadow.gain(method).is_none());
            let mut rng = SmallRng::seed_from_u64(1);
            for _ in 0..steps {
                shadow.observe(&gradient(&mut rng, layers.values())).unwrap();
            }
            let (found, truth) = (shadow.gain(method).unwrap(), live(method, &layers, steps));
            assert_eq!(found.steps, steps as u64);
            assert!((found.gain / truth - 1.0).abs() < 0.05, "{method:?}: shadow {found:?}, live {truth}");
        }
        let (method, layers) = (method(Compressor::TopK, 0.01), Layers::fused(60_000).unwrap());
        let (short, long) = (live(method, &layers, 10), live(method, &layers, 800));
        assert!(short > 1.5 * long, "{short} after 10 steps, {long} in the long run");
    }

    #[test]
    fn every_layer_has_its_share() {
        let layers = Layers::new(&[1_000, 0, 1, 9_000]).unwrap();
        let shadow = Shadow::new(&layers, 100, 7).unwrap();
        let lengths: Vec<usize> = shadow.layers.ranges().map(|r| r.len()).collect();
        assert_eq!(lengths, [10, 0, 1, 90]);
        assert!(shadow.indices.windows(2).all(|w| w[0] < w[1]) && *shadow.indices.last().unwrap() < 10_001);
        let all = Shadow::new(&layers, 10_001, 7).unwrap();
        assert!(all.indices.is_empty() && all.layers == layers);
    }

    #[test]
    fn bad_gradients_change_nothing_and_candidates_are_limited() {
        let layers = Layers::fused(100).unwrap();
        let mut shadow = Shadow::new(&layers, 50, 7).unwrap();
        let topk = method(Compressor::TopK, 0.1);
        shadow.add(topk);
        shadow.observe(&[1.0; 100]).unwrap();
        let before = shadow.gain(topk);
        assert!(shadow.observe(&[1.0; 99]).is_err());
        assert!(shadow.observe(&[f32::NAN; 100]).is_err());
        assert_eq!(shadow.gain(topk), before);
        let added = (1..=MAX_SHADOWS).filter(|i| shadow.add(method(Compressor::TopK, 0.2 + *i as f64 * 1e-3))).count();
        assert_eq!(added, MAX_SHADOWS - 1);
        assert!(shadow.add(topk), "it runs already");
    }
}
