//! The checker's own arithmetic: closed forms over real bytes, as an interval.
//!
//! Over equal links and N a power of two the interval is a point. Otherwise it reaches from every hop over
//! the best link to every hop over the worst, and from the whole number of tree levels below log N to the one
//! above.

use crate::{Outcome, Snapshot};
use flexcomm_domain::{Collective, IndexBytes, Link, LinkMatrix, Selection, Strategy};
use flexcomm_optimizer::Coefficients;

/// From the least to the most, seconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Range {
    pub(super) low: f64,
    pub(super) high: f64,
}

impl Range {
    /// Whether a value lies inside, give or take rounding.
    pub(super) fn holds(&self, value: f64) -> bool {
        let slack = super::TOLERANCE * self.high.abs() + 1e-12;
        value >= self.low - slack && value <= self.high + slack
    }
}

/// How often a latency and how many bytes lie on the way.
#[derive(Debug, Clone, Copy)]
struct Path {
    hops: f64,
    bytes: f64,
}

/// The time of a strategy's communication, `fixed + a * latencies + b * bytes * beta`.
pub(super) fn sync(s: &Snapshot, strategy: &Strategy, matrix: &LinkMatrix) -> Range {
    sync_of(s, strategy, s.gradient_values, matrix)
}

/// The same for so many values of the gradient.
pub(super) fn sync_of(s: &Snapshot, strategy: &Strategy, values: u64, matrix: &LinkMatrix) -> Range {
    if s.ranks < 2 {
        let fixed = s.coefficients.get(strategy.collective(), &s.backend).fixed_s;
        return Range { low: fixed.min(0.0), high: fixed.max(0.0) };
    }
    let (few, many) = paths(s, strategy, values as f64);
    let ((alpha_low, alpha_high), (beta_low, beta_high)) = extremes(matrix);
    let c = s.coefficients.get(strategy.collective(), &s.backend);
    let even = alpha_low == alpha_high && beta_low == beta_high && few.hops == many.hops && few.bytes == many.bytes;
    if even {
        let t = c.fixed_s + c.a * few.hops * alpha_low + bandwidth(&c, few.bytes * beta_low);
        return Range { low: t, high: t };
    }
    // Which hops are critical depends on the links; only the sum of both terms is bounded.
    let low = few.hops * alpha_low + few.bytes * beta_low;
    let high = many.hops * alpha_high + many.bytes * beta_high;
    let most = if high > c.beta_seen_s { c.b.max(1.0) } else { c.b };
    Range { low: c.fixed_s + c.a.min(c.b) * low, high: c.fixed_s + c.a.max(most) * high }
}

/// The bandwidth term as weighed: what is longer than all that was measured counts in full.
fn bandwidth(c: &Coefficients, term: f64) -> f64 {
    if term <= c.beta_seen_s || c.b >= 1.0 { c.b * term } else { c.b * c.beta_seen_s + term - c.beta_seen_s }
}

fn paths(s: &Snapshot, strategy: &Strategy, values: f64) -> (Path, Path) {
    let n = f64::from(s.ranks);
    let kept = (strategy.cr().get() * values).round().clamp(1.0, values);
    let codec = s.offer.codecs.get(&strategy.family());
    let (header, value) = codec.map_or((0.0, 4.0), |codec| (codec.header_bytes as f64, codec.value_bytes));
    let indices = header
        + match codec.map_or(IndexBytes::Each(4.0), |codec| codec.indices) {
            IndexBytes::Each(bytes) => kept * bytes,
            IndexBytes::Least => index_set(values, kept),
        };
    let (sent, rounds) = match (strategy.is_dense(), codec) {
        (true, _) => (4.0 * values, 1.0),
        (false, codec) => (indices + kept * value, codec.map_or(1.0, |codec| f64::from(codec.rounds))),
    };
    let levels = [n.log2().floor(), n.log2().ceil()];
    let path = |levels: f64| match strategy.collective() {
        Collective::DenseRing => Path { hops: rounds * 2.0 * (n - 1.0), bytes: 2.0 * (n - 1.0) / n * sent },
        Collective::DenseTree => Path { hops: rounds * 2.0 * levels, bytes: 2.0 * levels * sent },
        Collective::Allgather => Path { hops: rounds * levels, bytes: (n - 1.0) * sent },
        Collective::ArtRing => {
            Path { hops: levels + 2.0 * (n - 1.0), bytes: levels * indices + 2.0 * (n - 1.0) / n * kept * value }
        }
        Collective::ArtTree => Path { hops: 3.0 * levels, bytes: levels * indices + 2.0 * levels * kept * value },
    };
    let [mut few, mut many] = levels.map(path);
    let gathers = strategy.collective() == Collective::Allgather || strategy.selection() == Some(Selection::Var);
    if gathers && few.hops != many.hops {
        // Without a power of two an allgather goes around a ring.
        many.hops += rounds * (n - 1.0);
    }
    if strategy.selection() == Some(Selection::Var) {
        // Every rank tells every other its norm, 4 bytes.
        few = Path { hops: few.hops + levels[0], bytes: few.bytes + 4.0 * (n - 1.0) };
        many = Path { hops: many.hops + levels[1], bytes: many.bytes + 4.0 * (n - 1.0) };
    }
    (few, many)
}

/// Bytes of a set of k indices below n: one that names the coding, and the least of four bytes each, a bit per value, and Elias-Fano,
/// reckoned here by itself.
fn index_set(n: f64, k: f64) -> f64 {
    if k < 1.0 {
        return 1.0;
    }
    let low = (n / k).floor().max(1.0).log2().floor();
    let elias_fano = (k * low / 8.0).ceil() + ((k + (n / low.exp2()).floor() + 1.0) / 8.0).ceil();
    1.0 + (4.0 * k).min((n / 8.0).ceil()).min(elias_fano)
}

/// By which factors the job's own steps may correct the model: from the least to the most that they took against it, and 1,
/// since a factor of one collective is carried over to another in part.
pub(super) fn factors(s: &Snapshot, outcome: &Outcome) -> (f64, f64) {
    let each = outcome.memory.seen.iter().filter_map(|x| {
        let (c, terms) = (s.coefficients.get(x.strategy.collective(), &s.backend), x.terms?);
        let modelled = c.fixed_s + c.a * terms.alpha_s + bandwidth(&c, terms.beta_s);
        let factor = x.cost.t_sync.get() / modelled;
        (factor.is_finite() && factor > 0.0).then_some(factor)
    });
    each.fold((1.0, 1.0), |(least, most), factor| (least.min(factor), most.max(factor)))
}

/// (mean alpha, mean beta) between different ranks.
pub(super) fn means(matrix: &LinkMatrix) -> (f64, f64) {
    let links: Vec<Link> = matrix.between().collect();
    let mean = |of: fn(&Link) -> f64| links.iter().map(of).sum::<f64>() / links.len() as f64;
    (mean(|l| l.alpha.get()), mean(|l| 8.0 / l.bandwidth.get()))
}

/// ((least, most alpha), (least, most beta)) between different ranks.
pub(super) fn extremes(matrix: &LinkMatrix) -> ((f64, f64), (f64, f64)) {
    let none = (f64::INFINITY, f64::NEG_INFINITY);
    let widen = |(low, high): (f64, f64), v: f64| (low.min(v), high.max(v));
    matrix.between().fold((none, none), |(alpha, beta), link| {
        (widen(alpha, link.alpha.get()), widen(beta, 8.0 / link.bandwidth.get()))
    })
}

/// Seconds for the progress of a dense step when under error feedback it takes gain^-p steps, of factors of rank r gain^(-0.5 p/r).
/// Without a memory p is 1; of an unbiased compressor nothing is lost, and its noise counts.
pub(super) fn worth(s: &Snapshot, strategy: &Strategy, (t_step_s, gain): (f64, f64), p: f64) -> f64 {
    let spec = strategy.spec();
    let steps = match spec.memory() {
        Some(_) => (-p * kind(strategy) * gain.ln()).exp(),
        None if spec.is_unbiased_without_memory() => 1.0 + noise(s, strategy, gain),
        None => 1.0 / gain,
    };
    t_step_s * steps
}

/// By what p is multiplied for a strategy with error feedback.
pub(super) fn kind(strategy: &Strategy) -> f64 {
    strategy.spec().rank().map_or(1.0, |rank| 0.5 / rank as f64)
}

/// The relative variance of the mean that an unbiased compressor of this gain adds without error feedback.
pub(super) fn noise(s: &Snapshot, strategy: &Strategy, gain: f64) -> f64 {
    strategy.spec().variance_of_mean(gain, s.ranks as usize)
}

/// The step: both phases one after the other, or overlapped with exponent g.
pub(super) fn step(compute: f64, communicate: f64, g: f64) -> f64 {
    let (long, short) = if compute > communicate { (compute, communicate) } else { (communicate, compute) };
    if long == 0.0 {
        return 0.0;
    }
    long * (1.0 + (short / long).powf(g)).powf(1.0 / g)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_domain::JobId;

    fn time(strategy: &str, n: u32) -> Range {
        let s = Snapshot::new(JobId::new("j").unwrap(), n, 1_000_000);
        let matrix = LinkMatrix::uniform(n as usize, Link::new(0.001, 1e9).unwrap()).unwrap();
        sync(&s, &strategy.parse().unwrap(), &matrix)
    }

    #[test]
    fn closed_forms_by_hand() {
        // M = 4 MB, beta = 8 ns/B, N = 8: Mb = 32 ms.
        for (strategy, ms) in [
            ("none@1/dense-ring", 14.0 + 1.75 * 32.0),
            ("none@1/dense-tree", 6.0 + 6.0 * 32.0),
            ("topk@0.1/allgather", 3.0 + 7.0 * 2.0 * 3.2),
            ("topk@0.1/art-ring:star", 17.0 + (3.0 + 1.75) * 3.2),
            ("topk@0.1/art-tree:star", 9.0 + 9.0 * 3.2),
            ("topk@0.1/art-tree:var", 12.0 + 9.0 * 3.2 + 28.0 * 8e-6),
        ] {
            let t = time(strategy, 8);
            assert_eq!(t.low, t.high, "{strategy}");
            assert!((t.low * 1e3 - ms).abs() < 1e-9, "{strategy}: {} against {ms}", t.low * 1e3);
        }
        let odd = time("none@1/dense-tree", 6);
        assert!(odd.low < odd.high);
        assert_eq!(time("none@1/dense-ring", 1).high, 0.0);
    }

    #[test]
    fn overlap() {
        assert_eq!(step(3.0, 4.0, 1.0), 7.0);
        assert_eq!(step(3.0, 4.0, 2.0), 5.0);
        assert_eq!(step(0.0, 0.0, 2.0), 0.0);
    }
}
