//! What knowing more would save: expected values of information by common samples, in the unit of the scores.

use crate::beliefs::Priced;

/// Parts of equal probability that the range of a quantity is divided into.
const PARTS: usize = 16;

/// Scores of candidates that the policy admits, by candidate and sample.
pub(crate) struct Scores<'a> {
    of: Vec<&'a [f64]>,
    means: Vec<f64>,
    least: f64,
}

impl<'a> Scores<'a> {
    /// None where nothing is admitted.
    pub(crate) fn new(all: &'a [Priced]) -> Option<Self> {
        let admitted = || all.iter().filter(|x| !x.scores.is_empty());
        let means: Vec<f64> = admitted().map(|x| x.mean).collect();
        let least = means.iter().copied().reduce(f64::min)?;
        Some(Self { of: admitted().map(|x| x.scores.as_slice()).collect(), means, least })
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
    /// about the same value; of what they differ by from their means the measurement resolves the share that the quantity's doubt has in
    /// its own and the measurement's. Less what the same reckoning finds by chance, with samples in an order that has nothing to do with
    /// the quantity.
    pub(crate) fn of_measuring(&self, quantity: &[f64], sd: f64) -> f64 {
        let count = quantity.len() as f64;
        let mean = quantity.iter().sum::<f64>() / count;
        let own_sd = (quantity.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count).sqrt();
        let resolved = own_sd / own_sd.hypot(sd).max(f64::MIN_POSITIVE);
        // Samples of different quantities are in random order.
        let mut order: Vec<usize> = (0..quantity.len()).collect();
        let by_chance = self.of_parts(&order, resolved);
        order.sort_by(|a, b| quantity[*a].total_cmp(&quantity[*b]));
        (self.of_parts(&order, resolved) - by_chance).max(0.0)
    }

    /// What choosing by the best of each part of an order saves.
    fn of_parts(&self, order: &[usize], resolved: f64) -> f64 {
        let best = |part: &[usize]| {
            let expected = |(scores, mean): (&&[f64], &f64)| {
                let here = part.iter().map(|k| scores[*k]).sum::<f64>() / part.len() as f64;
                mean + resolved * (here - mean)
            };
            part.len() as f64 * self.of.iter().zip(&self.means).map(expected).fold(f64::INFINITY, f64::min)
        };
        self.least - order.chunks(order.len().div_ceil(PARTS)).map(best).sum::<f64>() / order.len() as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_estimation::Draws;

    fn scores(of: &[Vec<f64>]) -> Scores<'_> {
        let means: Vec<f64> = of.iter().map(|x| x.iter().sum::<f64>() / x.len() as f64).collect();
        let least = means.iter().copied().fold(f64::INFINITY, f64::min);
        Scores { of: of.iter().map(Vec::as_slice).collect(), means, least }
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

    #[test]
    fn what_has_nothing_to_do_with_it_is_worth_next_to_nothing() {
        let both = apart(Draws::shared().row(0));
        let other = scores(&both).of_measuring(Draws::shared().row(1), 0.0);
        assert!((0.0..0.08).contains(&other), "{other}");
        let first_is_best = vec![vec![1.0; 256], Draws::shared().row(0).iter().map(|x| 10.0 + x).collect()];
        assert_eq!(scores(&first_is_best).of_measuring(Draws::shared().row(0), 0.0), 0.0);
    }
}
