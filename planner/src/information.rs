//! What knowing more would save: expected values of information by common samples, in the unit of the scores.

use crate::beliefs::Priced;

/// Parts of equal probability that the range of a quantity is divided into.
const PARTS: usize = 16;

/// Scores of the candidates that may be chosen, by candidate and sample.
pub(crate) struct Scores<'a> {
    of: Vec<&'a [f64]>,
    means: Vec<f64>,
    /// The best in the mean.
    best: usize,
}

impl<'a> Scores<'a> {
    /// None where nothing may be chosen.
    pub(crate) fn new(all: &'a [Priced]) -> Option<Self> {
        let admitted = || all.iter().filter(|x| x.mean.is_finite());
        Self::of(admitted().map(|x| x.scores.as_slice()).collect(), admitted().map(|x| x.mean).collect())
    }

    fn of(of: Vec<&'a [f64]>, means: Vec<f64>) -> Option<Self> {
        let best = least(0..means.len(), |x| means[x])?;
        Some(Self { of, means, best })
    }

    /// What the best in the mean takes.
    pub(crate) fn least(&self) -> f64 {
        self.means[self.best]
    }

    /// Of perfect information: what choosing by the samples' own best saves over the best in the mean.
    pub(crate) fn of_perfect_information(&self) -> f64 {
        let samples = self.of[self.best].len();
        let best = |k: usize| self.of.iter().map(|scores| scores[k]).fold(f64::INFINITY, f64::min);
        self.least() - (0..samples).map(best).sum::<f64>() / samples as f64
    }

    /// Of one measurement of a quantity, given its samples and the measurement's standard deviation. Samples of about the same value are one
    /// part; a candidate is chosen by its mean over one half of a part, and what it saves is its mean over the other half, since the least of
    /// several means is below what its candidate takes. Of what means of parts differ from those of all samples the measurement resolves the
    /// share that the quantity's doubt has in its own and the measurement's. By what the two halves of parts differ the standard error of the
    /// whole is known, of which two are subtracted: what is answered is almost surely there.
    pub(crate) fn of_sample_information(&self, quantity: &[f64], sd: f64) -> f64 {
        let count = quantity.len() as f64;
        let mean = quantity.iter().sum::<f64>() / count;
        let own_sd = (quantity.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count).sqrt();
        let resolved = own_sd / own_sd.hypot(sd).max(f64::MIN_POSITIVE);
        let mut order: Vec<usize> = (0..quantity.len()).collect();
        order.sort_by(|a, b| quantity[*a].total_cmp(&quantity[*b]));
        let saves = |part: &[usize]| {
            let [first, second] = [0, 1].map(|i| part.iter().skip(i).step_by(2).copied().collect::<Vec<_>>());
            (self.saves(&first, &second, resolved), self.saves(&second, &first, resolved))
        };
        let each: Vec<(f64, f64)> = order.chunks(order.len().div_ceil(PARTS).max(2)).map(saves).collect();
        let count = each.len().max(1) as f64;
        let mean = each.iter().map(|(a, b)| 0.5 * (a + b)).sum::<f64>() / count;
        let error = each.iter().map(|(a, b)| 0.25 * (a - b).powi(2)).sum::<f64>().sqrt() / count;
        (mean - 2.0 * error).max(0.0)
    }

    /// What the best over some samples saves in the mean over others.
    fn saves(&self, chosen: &[usize], judged: &[usize], resolved: f64) -> f64 {
        if judged.is_empty() {
            return 0.0;
        }
        let expected = |x: usize, samples: &[usize]| {
            let mean = samples.iter().map(|k| self.of[x][*k]).sum::<f64>() / samples.len() as f64;
            self.means[x] + resolved * (mean - self.means[x])
        };
        let choice = least(0..self.of.len(), |x| expected(x, chosen)).unwrap_or(self.best);
        expected(self.best, judged) - expected(choice, judged)
    }
}

/// Of which candidate that is the least.
fn least(of: impl Iterator<Item = usize>, by: impl Fn(usize) -> f64) -> Option<usize> {
    of.map(|x| (x, by(x))).min_by(|a, b| a.1.total_cmp(&b.1)).map(|(x, _)| x)
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
        assert!((scores.of_perfect_information() / all - 1.0).abs() < 0.05, "{}", scores.of_perfect_information());
        let known = scores.of_sample_information(x, 0.0);
        assert!((0.75..=1.0).contains(&(known / all)), "{known} of {all}");
        let vaguely = scores.of_sample_information(x, 1.0);
        assert!((0.5..0.8).contains(&(vaguely / known)), "resolves 0.7 of it: {vaguely} of {known}");
    }

    /// Twenty candidates within two percent, each with noise of its own by which it is multiplied.
    fn alike(of: impl Fn(usize, usize) -> f64) -> Vec<Vec<f64>> {
        let noise = |i: usize, k: usize| (0.07 * Draws::shared().row(1 + i)[k]).exp();
        (0..20).map(|i| (0..256).map(|k| (1.0 + 0.001 * i as f64) * noise(i, k) * of(i, k)).collect()).collect()
    }

    #[test]
    fn what_has_nothing_to_do_with_it_is_worth_next_to_nothing() {
        let all = alike(|_, _| 1.0);
        let quantities = (100..140).map(|row| Draws::shared().row(row));
        let worth: Vec<f64> = quantities.map(|x| scores(&all).of_sample_information(x, 0.0)).collect();
        let seen = worth.iter().filter(|worth| **worth > 0.0).count();
        assert!(seen <= 4 && worth.iter().all(|worth| *worth < 0.003), "{worth:?}");
        let first_is_best = vec![vec![1.0; 256], Draws::shared().row(0).iter().map(|x| 10.0 + x).collect()];
        assert_eq!(scores(&first_is_best).of_sample_information(Draws::shared().row(0), 0.0), 0.0);
    }

    /// Right after a change a bandwidth may be anything in some decades, and what a step takes with it.
    #[test]
    fn what_decides_is_seen_among_many() {
        let x = Draws::shared().row(0);
        let all = alike(|i, k| (if i % 2 == 0 { 0.1 } else { -0.1 } * x[k]).exp());
        let few = scores(&all).of_sample_information(x, 0.0);
        // E 0.1 |x| = 0.08.
        assert!((0.05..0.1).contains(&few), "{few}");
        let all = alike(|i, k| 1.0 + 0.1 * (2.0 * x[k]).exp() / (1.0 + i as f64) + 0.02 * i as f64);
        let (perfect, many) =
            (scores(&all).of_perfect_information(), scores(&all).of_sample_information(x, 0.38 / 2.0));
        assert!(many > 0.2 * perfect && many <= perfect, "{many} of {perfect}");
    }
}
