//! What knowing more would save: expected values of information by common samples, in the unit of the scores.

use crate::beliefs::Priced;

/// Parts of equal probability that the range of a quantity is divided into.
const PARTS: usize = 16;
/// Orders of the samples that have nothing to do with the quantity.
const CHANCES: usize = 8;

/// Scores of the candidates that may be chosen, by candidate and sample.
pub(crate) struct Scores<'a> {
    of: Vec<&'a [f64]>,
    means: Vec<f64>,
    least: f64,
}

impl<'a> Scores<'a> {
    /// None where nothing may be chosen.
    pub(crate) fn new(all: &'a [Priced]) -> Option<Self> {
        let admitted = || all.iter().filter(|x| x.mean.is_finite());
        Self::of(admitted().map(|x| x.scores.as_slice()).collect(), admitted().map(|x| x.mean).collect())
    }

    fn of(of: Vec<&'a [f64]>, means: Vec<f64>) -> Option<Self> {
        let least = means.iter().copied().reduce(f64::min)?;
        Some(Self { of, means, least })
    }

    /// What the best in the mean takes.
    pub(crate) fn least(&self) -> f64 {
        self.least
    }

    /// Of perfect information: what choosing by the samples' own best saves over the best in the mean.
    pub(crate) fn of_all(&self) -> f64 {
        let samples = self.of[0].len();
        let best = |k: usize| self.of.iter().map(|scores| scores[k]).fold(f64::INFINITY, f64::min);
        self.least - (0..samples).map(best).sum::<f64>() / samples as f64
    }

    /// Of one measurement of a quantity, given its samples and the measurement's standard deviation. Scores are averaged over samples of
    /// about the same value; of what these means differ by the measurement resolves the share that the quantity's doubt has in its own and
    /// the measurement's. Means of so few samples differ by chance, too: what is left of the scores without them, in orders that have
    /// nothing to do with the quantity, tells how much that is at most.
    pub(crate) fn of_measuring(&self, quantity: &[f64], sd: f64) -> f64 {
        let count = quantity.len();
        let mean = quantity.iter().sum::<f64>() / count as f64;
        let own_sd = (quantity.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count as f64).sqrt();
        let resolved = own_sd / own_sd.hypot(sd).max(f64::MIN_POSITIVE);
        let mut order: Vec<usize> = (0..count).collect();
        order.sort_by(|a, b| quantity[*a].total_cmp(&quantity[*b]));
        let saves = self.of_parts(&order, resolved);
        if saves <= 0.0 {
            return 0.0;
        }
        let left: Vec<Vec<f64>> = self.of.iter().zip(&self.means).map(|(of, mean)| left(of, *mean, &order)).collect();
        let left =
            Scores { of: left.iter().map(Vec::as_slice).collect(), means: self.means.clone(), least: self.least };
        // Samples are independent: those a stride apart are as good as any. An odd stride visits each of 2^n samples once.
        let stride = |i: usize| (0..count).map(|k| k * (2 * i + 1) % count).collect::<Vec<_>>();
        let by_chance = (0..CHANCES).map(|i| left.of_parts(&stride(i), resolved)).fold(0.0, f64::max);
        (saves - by_chance).max(0.0)
    }

    /// What choosing by the best of each part of an order saves.
    fn of_parts(&self, order: &[usize], resolved: f64) -> f64 {
        let best = |part: &[usize]| {
            let expected = |(scores, mean): (&&[f64], &f64)| mean + resolved * (part_mean(scores, part) - mean);
            part.len() as f64 * self.of.iter().zip(&self.means).map(expected).fold(f64::INFINITY, f64::min)
        };
        self.least - parts(order).map(best).sum::<f64>() / order.len() as f64
    }
}

fn parts(order: &[usize]) -> impl Iterator<Item = &[usize]> {
    order.chunks(order.len().div_ceil(PARTS).max(1))
}

fn part_mean(scores: &[f64], part: &[usize]) -> f64 {
    part.iter().map(|k| scores[*k]).sum::<f64>() / part.len() as f64
}

/// Scores with the mean over all in place of each part's.
fn left(scores: &[f64], mean: f64, order: &[usize]) -> Vec<f64> {
    let mut left = scores.to_vec();
    for part in parts(order) {
        let differs = part_mean(scores, part) - mean;
        part.iter().for_each(|k| left[*k] -= differs);
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_estimation::Draws;

    fn scores(of: &[Vec<f64>]) -> Scores<'_> {
        let means = of.iter().map(|x| x.iter().sum::<f64>() / x.len() as f64).collect();
        Scores::of(of.iter().map(Vec::as_slice).collect(), means).unwrap()
    }

    /// Two candidates of which the second takes x, of a standard normal distribution, more than the first.
    fn apart(x: &[f64]) -> Vec<Vec<f64>> {
        vec![vec![10.0; x.len()], x.iter().map(|x| 10.0 + x).collect()]
    }

    #[test]
    fn what_decides_is_worth_half_its_mean_deviation() {
        let x = Draws::shared().row(0);
        let both = apart(x);
        let scores = scores(&both);
        // E max(0, -x) of a standard normal distribution.
        let all = (2.0 * std::f64::consts::PI).sqrt().recip();
        assert!((scores.of_all() / all - 1.0).abs() < 0.05, "{}", scores.of_all());
        let known = scores.of_measuring(x, 0.0);
        assert!((0.75..=1.0).contains(&(known / all)), "{known} of {all}");
        let vaguely = scores.of_measuring(x, 1.0);
        assert!((0.5..0.8).contains(&(vaguely / known)), "resolves 0.7 of it: {vaguely} of {known}");
    }

    /// Twenty candidates within two percent, each with noise of its own.
    fn alike(of: impl Fn(usize, usize) -> f64) -> Vec<Vec<f64>> {
        let noise = |i: usize, k: usize| 0.07 * Draws::shared().row(1 + i)[k];
        (0..20).map(|i| (0..256).map(|k| 1.0 + 0.001 * i as f64 + noise(i, k) + of(i, k)).collect()).collect()
    }

    #[test]
    fn what_has_nothing_to_do_with_it_is_worth_next_to_nothing() {
        let quantities = || (100..140).map(|row| Draws::shared().row(row));
        let all = alike(|_, _| 0.0);
        let worth: Vec<f64> = quantities().map(|x| scores(&all).of_measuring(x, 0.0)).collect();
        let seen = worth.iter().filter(|worth| **worth > 0.002).count();
        assert!(seen <= 8 && worth.iter().all(|worth| *worth < 0.01), "{worth:?}");
        let first_is_best = vec![vec![1.0; 256], Draws::shared().row(0).iter().map(|x| 10.0 + x).collect()];
        assert_eq!(scores(&first_is_best).of_measuring(Draws::shared().row(0), 0.0), 0.0);
    }

    /// What it decides is seen among as many that do not hang on it.
    #[test]
    fn what_decides_is_seen_among_many() {
        let x = Draws::shared().row(0);
        let all = alike(|i, k| if i % 2 == 0 { 0.1 * x[k] } else { -0.1 * x[k] });
        let worth = scores(&all).of_measuring(x, 0.0);
        // E max(0.1 |x|).
        assert!((0.05..0.11).contains(&worth), "{worth}");
    }
}
