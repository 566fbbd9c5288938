//! What a compressor promises of what it sends: the field `nature` of [`super::CompressorInfo`] is the one table of it.

use super::{Class, CompressorSpec, Element, SpecError, Travels, Values, compressors};

/// What a compressor promises of C(x).
#[derive(Debug, Clone, Copy)]
pub enum Nature {
    /// E C(x) = x. With it ω = E ‖C(x) − x‖² / ‖x‖² on normally distributed values, by parameters and n. Bounds for any x are
    /// too far off to choose by: rounding to seven levels of the largest of 512 values may have 1.2 and has 0.03 on gradients.
    Unbiased(fn(&Values, usize) -> f64),
    /// ‖x − C(x)‖² ≤ (1 − delta) ‖x‖² for every draw; delta by parameters and n.
    Contractive(fn(&Values, usize) -> f64),
    /// As [`Self::Contractive`], in the mean over draws.
    ContractiveInMean(fn(&Values, usize) -> f64),
    /// As [`Self::Contractive`], of what error feedback accumulates: without a memory hardly anything is ever sent.
    Accumulated(fn(&Values, usize) -> f64),
    /// Neither, with the reason.
    Biased(&'static str),
}

/// Values that a tensor is taken to have where only the gradient's are known: 2^18, a matrix of 512 rows and columns.
const TYPICAL_TENSOR: u64 = 1 << 18;

impl CompressorSpec {
    /// What the compressor promises.
    pub fn nature(&self) -> Nature {
        (self.compressor().nature)(self.values())
    }

    /// Whether what it sends is off in the mean and nothing makes up for that: a biased compressor without error feedback. Casts
    /// to half precision do not count: what they lose is below the noise of the gradient.
    pub fn is_biased_without_memory(&self) -> bool {
        let sent_as_it_is = std::ptr::eq(self.compressor(), &compressors::NONE);
        let cast = matches!(self.travels(), Travels::Sums(Element::F16 | Element::Bf16));
        self.memory().is_none() && !sent_as_it_is && !cast && !matches!(self.nature(), Nature::Unbiased(_))
    }

    /// Itself, where a training by it moves; one that sends next to nothing for ever, or ever more, is refused: error feedback of
    /// what is unbiased and not scaled ([`Self::is_scaled`]) diverges from a variance of 1 on.
    ///
    /// # Errors
    /// [`SpecError::NoMemory`]; [`SpecError::Diverges`].
    pub fn trainable(self) -> Result<Self, SpecError> {
        match (self.nature(), self.memory()) {
            (Nature::Accumulated(_), None) => Err(SpecError::NoMemory { of: self.to_string() }),
            (Nature::Unbiased(_), Some(_)) if !self.is_scaled() => Err(SpecError::Diverges { of: self.to_string() }),
            _ => Ok(self),
        }
    }

    /// Whether what a step does not send is lost for good: values are left out, and no memory keeps them.
    pub fn drops(&self) -> bool {
        let leaves_out = match self.compressor().class {
            Class::Quantization => false,
            Class::LowRank => !matches!(self.nature(), Nature::Unbiased(_)),
            Class::Sparsification | Class::Hybrid => !matches!(self.nature(), Nature::Unbiased(_) | Nature::Biased(_)),
        };
        leaves_out && self.memory().is_none()
    }

    /// Whether each tensor is scaled down by the variance that an unbiased quantizer adds, so that error feedback does not grow
    /// without bound.
    pub fn is_scaled(&self) -> bool {
        // Of what leaves values out, how much is sent of one draw says nothing of the variance: what misses the large values
        // looks small. What rounds every value has no such draws.
        let rounds = self.compressor().class == Class::Quantization && self.travels() == Travels::Gathers;
        self.memory().is_some() && rounds && matches!(self.nature(), Nature::Unbiased(_))
    }

    /// Whether it is unbiased and has no error feedback: what is lost in one step is noise, of which nothing is kept.
    pub fn is_unbiased_without_memory(&self) -> bool {
        self.memory().is_none() && matches!(self.nature(), Nature::Unbiased(_))
    }

    /// ω of an unbiased compressor on a normally distributed gradient of so many values: what is taken of it until the job has
    /// measured its own. None of any other compressor.
    pub fn typical_variance(&self, values: u64) -> Option<f64> {
        let Nature::Unbiased(variance) = self.nature() else { return None };
        Some(variance(self.values(), self.typical_tensor(values)).max(0.0))
    }

    /// The gain on a normally distributed gradient of so many values, of which top-k of as many values keeps `topk`: what is taken
    /// of a biased compressor until the job has measured its own. None where it depends on the gradient's unit, or on its bits alone.
    pub fn typical_gain(&self, values: u64, topk: f64) -> Option<f64> {
        (self.compressor().typical_gain)(self.values(), Typical { n: self.typical_tensor(values), topk })
    }

    /// Values of one tensor of a gradient of so many.
    fn typical_tensor(&self, values: u64) -> usize {
        let n = match self.scope() {
            super::Scope::Bucket => values,
            super::Scope::Tensor => values.min(TYPICAL_TENSOR),
        };
        n as usize
    }

    /// The relative variance ω/N of the mean over `ranks`, of a compressor whose gain 1/(1 + ω) is known: where ranks draw
    /// independently N is their number, and 1 where all draw alike, which is what lets their messages be summed. 0 of any but
    /// unbiased compressors without error feedback.
    pub fn variance_of_mean(&self, gain: f64, ranks: usize) -> f64 {
        if !self.is_unbiased_without_memory() {
            return 0.0;
        }
        let draws = if self.travels() == Travels::Gathers { ranks.max(1) } else { 1 };
        (1.0 / gain - 1.0) / draws as f64
    }
}

/// What the gain of a compressor is reckoned from before a job has measured it.
#[derive(Debug, Clone, Copy)]
pub struct Typical {
    /// Values of one tensor.
    pub n: usize,
    /// What top-k of as many values keeps: what a selection by magnitude, however it is sent, cannot exceed.
    pub topk: f64,
}

/// E|x| of a standard normal value: sqrt(2/π).
const MEAN_MAGNITUDE: f64 = 0.797_884_560_802_865_4;

/// ω of rounding at random to powers of two: (|x| − a)(2a − |x|) / x² averaged over x in [a, 2a) by energy.
pub(super) const POWERS_OF_TWO: f64 = 0.08;

/// E max|x| of n standard normal values, by the extreme value distribution's first two terms.
pub(super) fn largest_normal(n: usize) -> f64 {
    if n < 2 {
        return MEAN_MAGNITUDE;
    }
    let root = (2.0 * (2.0 * n as f64).ln()).sqrt();
    root - ((0.5 * root * root).ln() + (4.0 * std::f64::consts::PI).ln() - 2.0 * EULER_GAMMA) / (2.0 * root)
}

const EULER_GAMMA: f64 = 0.577_215_664_901_532_9;

/// ω of rounding standard normal values at random to multiples of `step`.
pub(super) fn grid(step: f64) -> f64 {
    rounding(step, MEAN_MAGNITUDE)
}

/// ω of rounding values of mean square 1 and this mean magnitude at random to multiples of `step`: step²/6 while a value meets many
/// steps, and step·E|x| − 1 once all values are below the first.
fn rounding(step: f64, mean: f64) -> f64 {
    let below_the_first = step * mean - 1.0;
    if step < 2.0 { below_the_first.max(step * step / 6.0) } else { below_the_first }
}

/// Of s levels of a norm of n values.
fn levels(s: f64, n: usize, is_largest: bool) -> f64 {
    grid(if is_largest { largest_normal(n) } else { (n as f64).sqrt() } / s)
}

/// Parameters s, bucket, norm.
pub(super) fn qsgd(values: &Values, n: usize) -> f64 {
    let bucket = match values.whole(1) {
        0 => n,
        bucket => bucket.min(n),
    };
    levels(values.number(0), bucket, values.whole(2) == 1)
}

/// Parameters k, partition, normalize. Of powers of two, what is below the lowest is rounded as to a grid.
pub(super) fn dithering(values: &Values, n: usize) -> f64 {
    let is_largest = values.whole(2) == 0;
    match values.whole(1) {
        0 => levels(values.number(0), n, is_largest),
        _ => POWERS_OF_TWO.max(levels((values.number(0) - 1.0).exp2(), n, is_largest)),
    }
}

/// Parameters bits, lambda.
pub(super) fn lpcsvrg(values: &Values, n: usize) -> f64 {
    levels((values.number(0) - 1.0).exp2() - 1.0, n, true)
}

/// Parameter k: probabilities in proportion to |x| send x / p, so that E C² is (Σ|x|)² / k.
pub(super) fn adaptive(values: &Values, n: usize) -> f64 {
    MEAN_MAGNITUDE * MEAN_MAGNITUDE * n as f64 / values.kept(0, n).max(1) as f64 - 1.0
}

/// Parameter budget: probabilities in proportion to singular values, of a square matrix whose values are independent. Theirs
/// follow the quarter circle: (Σσ)² / ‖A‖² is (8 / 3π)² of the rank.
pub(super) fn atomo(values: &Values, n: usize) -> f64 {
    let share = 8.0 / (3.0 * std::f64::consts::PI);
    share * share * (n as f64).sqrt() / values.number(0) - 1.0
}

/// Signs times mean |x|, or times the mean of each side of 0: (mean |x|)² of mean x² is sent, 2/π.
pub(super) fn mean_signs(_: &Values, _: Typical) -> Option<f64> {
    Some(MEAN_MAGNITUDE * MEAN_MAGNITUDE)
}

/// Parameter k: any k of n values have k/n of the energy.
pub(super) fn random(values: &Values, typical: Typical) -> Option<f64> {
    Some(share(values, typical.n))
}

/// k/n, k being the first parameter.
fn share(values: &Values, n: usize) -> f64 {
    values.kept(0, n) as f64 / n.max(1) as f64
}

/// Share of the energy of the largest k of n values that is left when each is sent as its sign times their mean magnitude. They lie
/// beyond z, p = k/n of all: their mean is 2φ(z)/p, so 4φ(z)²/p of all energy is sent, of p + 2zφ(z) that they have.
fn of_one_magnitude(share: f64) -> f64 {
    let z = quantile(share);
    4.0 * density(z).powi(2) / (share * (share + 2.0 * z * density(z)))
}

/// Parameter k: where the largest values of each sign are, and one mean for each.
pub(super) fn signed_topk(values: &Values, typical: Typical) -> Option<f64> {
    Some(typical.topk * of_one_magnitude(share(values, typical.n)))
}

/// Parameters k, select, quantize, s, scaled. Signs carry the mean magnitude of what is kept. Levels are of the norm of the k
/// values, rounded at random with a variance ω: divided by 1 + β they miss ((β² + ω)/(1 + β)²) of what was kept.
pub(super) fn qsparse(values: &Values, typical: Typical) -> Option<f64> {
    let (share, s) = (share(values, typical.n), values.number(3));
    let (kept, mean_square) = match values.whole(1) {
        0 => (typical.topk, of_one_magnitude(share)),
        _ => (share, MEAN_MAGNITUDE * MEAN_MAGNITUDE),
    };
    if values.whole(2) == 1 {
        return Some(kept * mean_square);
    }
    let k = share * typical.n as f64;
    // In units of their root mean square, of which their mean magnitude is the root of that share.
    let variance = rounding(k.sqrt() / s, mean_square.sqrt());
    let excess = if values.is_on(4) { quantizer_bound(k as usize, s as usize) } else { 0.0 };
    Some(kept * (1.0 - (excess * excess + variance) / (1.0 + excess).powi(2)))
}

/// Parameter s. M = s max |x| is sent for what lies beyond M/2: of such a value's x² what stays is (|x| − M)². Mean over eight
/// quantiles of max |x|, whose spread counts.
pub(super) fn threelc(values: &Values, typical: Typical) -> Option<f64> {
    let gain = |quantile_of_max: f64| {
        let m = values.number(0) * quantile((-quantile_of_max.ln() / typical.n.max(1) as f64).min(1.0));
        m * (4.0 * density(0.5 * m) - 2.0 * m * tail(0.5 * m))
    };
    Some((0..8).map(|i| gain((f64::from(i) + 0.5) / 8.0)).sum::<f64>() / 8.0)
}

/// Parameters rank, lambda, of a square matrix whose values are independent: a step's products of rank r fit r(m + n − r) of m n
/// values, and the regulariser takes λ/(1 + λ) of every factor away.
pub(super) fn gradzip(values: &Values, typical: Typical) -> Option<f64> {
    let (side, lambda) = ((typical.n as f64).sqrt(), values.number(1));
    let rank = values.number(0).min(side);
    Some(rank * (2.0 * side - rank) / (side * side) * (1.0 - (lambda / (1.0 + lambda)).powi(2)))
}

/// Parameters d, slice, every. Of slices that have nothing in common any d directions of K have d/K, and the first step of a period
/// everything.
pub(super) fn gradiveq(values: &Values, _: Typical) -> Option<f64> {
    let (share, every) = ((values.number(0) / values.number(1)).min(1.0), values.number(2));
    Some((1.0 + every * share) / (1.0 + every))
}

/// φ(z).
fn density(z: f64) -> f64 {
    (-0.5 * z * z).exp() / std::f64::consts::TAU.sqrt()
}

/// P(x > z) of a standard normal x, for z of 1 and more: Laplace's continued fraction of Mills' ratio.
fn tail(z: f64) -> f64 {
    density(z) / (1..=60).rev().fold(z, |rest, i| z + f64::from(i) / rest)
}

/// The z that a share of the magnitudes exceeds, to 5e-4 (Abramowitz and Stegun, 26.2.23).
fn quantile(share: f64) -> f64 {
    let t = (-2.0 * (0.5 * share).ln()).sqrt();
    let (above, below) = (2.515_517 + t * (0.802_853 + t * 0.010_328), 1.432_788 + t * (0.189_269 + t * 0.001_308));
    (t - above / (1.0 + t * below)).max(0.0)
}

pub(super) fn of_qsparse(values: &Values) -> Nature {
    match (values.whole(1), values.whole(2)) {
        // ‖T‖₁²/k, what signs take away, is at least ‖T‖²/k, and that at least ‖x‖²/n.
        (0, 1) => Nature::Contractive(|_, n| 1.0 / n.max(1) as f64),
        (_, 1) => Nature::ContractiveInMean(|_, n| 1.0 / n.max(1) as f64),
        _ if values.is_on(4) => Nature::ContractiveInMean(|values, n| {
            let k = values.kept(0, n);
            k as f64 / (n.max(1) as f64 * (1.0 + quantizer_bound(k, values.whole(3))))
        }),
        _ => Nature::Biased("top-k is, and levels that are not scaled may expand what it keeps"),
    }
}

/// Parameters buckets, rows. A bucket's mean takes away n times its square, and the sum of these is at least ‖x‖²/n.
pub(super) fn of_sketchml(values: &Values) -> Nature {
    match values.whole(1) {
        0 => Nature::Contractive(|_, n| 1.0 / n.max(1) as f64),
        _ => Nature::Biased("collisions in the sketch make values smaller"),
    }
}

/// Bound on the relative variance of rounding k values at random to s levels of their norm (QSGD, lemma 3.1).
pub fn quantizer_bound(k: usize, s: usize) -> f64 {
    let (k, s) = (k as f64, s as f64);
    (k / (s * s)).min(k.sqrt() / s)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> CompressorSpec {
        text.parse().unwrap()
    }

    #[test]
    fn biased_without_memory_is_neither_a_cast_nor_fed_nor_unbiased() {
        for text in [
            "topk(k=0.1)",
            "eightbit",
            "signsgd",
            "powersgd(rank=2)",
            "topk(k=0.1)+nesterov(mu=0.9)",
            "terngrad(clip=2)",
        ] {
            assert!(spec(text).is_biased_without_memory(), "{text}");
            assert!(!spec(&format!("{text}+ef(vanilla)")).is_biased_without_memory(), "{text}");
        }
        for text in ["none", "fp16", "bf16", "qsgd(s=4)", "terngrad", "randomk(k=0.1,scaled=true)", "atomo(budget=3)"] {
            assert!(!spec(text).is_biased_without_memory(), "{text}");
        }
    }

    #[test]
    fn the_normal_distribution_is_near_enough() {
        for (z, above) in [(1.0, 0.158_655), (2.25, 0.012_224), (4.0, 3.167e-5)] {
            assert!((tail(z) / above - 1.0).abs() < 1e-4, "{z}: {}", tail(z));
            assert!((quantile(2.0 * above) - z).abs() < 5e-4, "{z}: {}", quantile(2.0 * above));
        }
        assert!((of_one_magnitude(1.0) - 2.0 / std::f64::consts::PI).abs() < 1e-3, "{}", of_one_magnitude(1.0));
        let gain = |text: &str| spec(text).typical_gain(1_000_000, 0.2);
        assert_eq!((gain("topk(k=0.1)"), gain("hardthreshold(tau=1)"), gain("onebit")), (None, None, None));
        assert_eq!(gain("gradzip(rank=4,lambda=0.001)").map(|g| (g * 1e4).round()), Some(156.0), "4 · 1020 of 512²");
    }

    #[test]
    fn ranks_average_what_they_draw_independently() {
        let of = |text: &str, gain| spec(text).variance_of_mean(gain, 8);
        assert_eq!(of("natural", 0.8), 0.25 / 8.0);
        assert_eq!(of("randomk(k=0.1,scaled=true)", 0.1), 9.0, "all ranks draw the same indices");
        assert_eq!(of("randomk(k=0.1,scaled=true,shared=false)", 0.1), 9.0 / 8.0);
        let typical = |text: &str| spec(text).typical_variance(1_000_000);
        assert_eq!((typical("natural"), typical("randomk(k=0.1,scaled=true)")), (Some(POWERS_OF_TWO), Some(9.0)));
        assert_eq!(typical("ssdm"), Some((TYPICAL_TENSOR - 1) as f64), "per tensor");
        for text in ["none", "fp16", "topk(k=0.1)", "qsgd(s=4)+ef(vanilla)"] {
            assert_eq!(of(text, 0.5), 0.0, "{text}");
        }
        assert_eq!((typical("topk(k=0.1)"), typical("natural+ef(vanilla)")), (None, Some(POWERS_OF_TWO)));
    }
}
