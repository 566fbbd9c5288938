//! Quantities with a joint normal distribution, and what an observation of a weighted sum of them says.

use crate::draws::{DRAWS, Draws};
use serde::{Deserialize, Serialize};

/// An observation that is further off than so many standard deviations moves what is believed as one at that distance would: pauses and
/// retransmission timeouts are outliers (Huber's loss).
const OUTLIER: f64 = 3.0;

/// Less than this share of a variance is what rounding to single precision leaves.
const LEAST_PIVOT: f64 = 1e-6;

/// Gauss-Newton steps at most.
const CURVED_STEPS: usize = 8;

/// Points on each side of the mean of a quadrature,
const ALONG: i32 = 16;
/// for which a quantity has to be known by less than this.
const ALONG_SD: f64 = 0.3;

/// A variance never falls below this share of what it was before an observation: rounding must not make it negative.
const LEAST_LEFT: f64 = 1e-9;

/// A weighted sum: where quantities are, and their weights.
pub type Row = Vec<(usize, f64)>;

/// Mean and standard deviation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Normal {
    /// Mean.
    pub mean: f64,
    /// Standard deviation.
    pub sd: f64,
}

impl Normal {
    /// Of a mean and a standard deviation.
    pub const fn new(mean: f64, sd: f64) -> Self {
        Self { mean, sd }
    }
}

/// Some quantities, by key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(from = "Stored<K>", into = "Stored<K>")]
#[serde(bound(serialize = "K: Clone + Serialize", deserialize = "K: Deserialize<'de>"))]
pub struct Joint<K> {
    keys: Vec<K>,
    mean: Vec<f64>,
    /// Row by row.
    covariance: Vec<f64>,
}

/// The lower triangle of the covariance, in single precision.
#[derive(Serialize, Deserialize)]
struct Stored<K> {
    keys: Vec<K>,
    mean: Vec<f32>,
    covariance: Vec<f32>,
}

impl<K> From<Stored<K>> for Joint<K> {
    /// What does not fit together is forgotten.
    fn from(stored: Stored<K>) -> Self {
        let n = stored.keys.len();
        let finite = stored.mean.iter().chain(&stored.covariance).all(|v| v.is_finite());
        let lengths = stored.mean.len() == n && stored.covariance.len() == n * (n + 1) / 2;
        let variance = |i: usize| stored.covariance[i * (i + 3) / 2];
        if !finite || !lengths || (0..n).any(|i| variance(i) < 0.0) {
            return Self::default();
        }
        let at = |i: usize, j: usize| f64::from(stored.covariance[i.max(j) * (i.max(j) + 1) / 2 + i.min(j)]);
        let covariance = (0..n * n).map(|k| at(k / n, k % n)).collect();
        Self { keys: stored.keys, mean: stored.mean.into_iter().map(f64::from).collect(), covariance }
    }
}

impl<K: Clone> From<Joint<K>> for Stored<K> {
    fn from(joint: Joint<K>) -> Self {
        let n = joint.keys.len();
        let lower = joint.covariance.iter().enumerate().filter(|(k, _)| k % n <= k / n);
        Self {
            covariance: lower.map(|(_, v)| *v as f32).collect(),
            mean: joint.mean.iter().map(|v| *v as f32).collect(),
            keys: joint.keys,
        }
    }
}

impl<K> Default for Joint<K> {
    fn default() -> Self {
        Self { keys: Vec::new(), mean: Vec::new(), covariance: Vec::new() }
    }
}

impl<K: PartialEq + Clone> Joint<K> {
    /// How many quantities.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Their keys, in the order in which they came.
    pub fn keys(&self) -> &[K] {
        &self.keys
    }

    /// Where a quantity is.
    pub fn find(&self, key: &K) -> Option<usize> {
        self.keys.iter().position(|k| k == key)
    }

    /// Where a quantity is; one that is new comes with its prior, independent of the others.
    pub fn place(&mut self, key: &K, prior: Normal) -> usize {
        if let Some(at) = self.find(key) {
            return at;
        }
        let (n, old) = (self.len() + 1, std::mem::take(&mut self.covariance));
        self.covariance = vec![0.0; n * n];
        for (i, row) in old.chunks(n.max(2) - 1).enumerate() {
            self.covariance[i * n..i * n + row.len()].copy_from_slice(row);
        }
        self.covariance[n * n - 1] = prior.sd * prior.sd;
        self.mean.push(prior.mean);
        self.keys.push(key.clone());
        n - 1
    }

    /// The same for one of a kind of which at most so many are known: the oldest of them is forgotten.
    pub fn place_among(&mut self, key: &K, prior: Normal, kind: impl Fn(&K) -> bool, most: usize) -> usize {
        if self.find(key).is_none()
            && self.keys.iter().filter(|k| kind(k)).count() >= most
            && let Some(oldest) = self.keys.iter().position(kind)
        {
            self.remove(oldest);
        }
        self.place(key, prior)
    }

    /// Forgets a quantity; the others stay as they are.
    pub fn remove(&mut self, at: usize) {
        let n = self.len();
        let kept = |i: usize| i != at;
        let all = std::mem::take(&mut self.covariance);
        self.covariance = all.iter().enumerate().filter(|(i, _)| kept(i / n) && kept(i % n)).map(|(_, v)| *v).collect();
        self.mean.remove(at);
        self.keys.remove(at);
    }

    /// What is believed of one quantity.
    pub fn of(&self, at: usize) -> Normal {
        Normal { mean: self.mean[at], sd: self.covariance[at * self.len() + at].max(0.0).sqrt() }
    }

    /// What is believed of a weighted sum.
    pub fn sum(&self, row: &[(usize, f64)]) -> Normal {
        let mean = row.iter().map(|(at, weight)| weight * self.mean[*at]).sum();
        let variance: f64 = row.iter().map(|(at, weight)| weight * self.with(row, *at)).sum();
        Normal { mean, sd: variance.max(0.0).sqrt() }
    }

    /// Whether an observation of a weighted sum is more than so many standard deviations from what is believed.
    pub fn is_far(&self, row: &[(usize, f64)], seen: Normal, deviations: f64) -> bool {
        let believed = self.sum(row);
        (seen.mean - believed.mean).abs() > deviations * believed.sd.hypot(seen.sd)
    }

    /// Covariance of one quantity with a weighted sum.
    fn with(&self, row: &[(usize, f64)], at: usize) -> f64 {
        let n = self.len();
        row.iter().map(|(other, weight)| weight * self.covariance[at * n + other]).sum()
    }

    /// Takes in that a weighted sum was observed to be `seen.mean`, off by `seen.sd`. Answers by how many standard deviations it
    /// differs from what was believed.
    pub fn observe(&mut self, row: &[(usize, f64)], seen: Normal) -> f64 {
        let believed = self.sum(row);
        let total = believed.sd * believed.sd + seen.sd * seen.sd;
        let off = (seen.mean - believed.mean) / total.sqrt();
        if !(total > 0.0 && total.is_finite() && off.is_finite()) {
            return 0.0;
        }
        let weight = (OUTLIER / off.abs()).min(1.0);
        let n = self.len();
        let scale = weight / total;
        let with: Vec<f64> = (0..n).map(|at| self.with(row, at)).collect();
        for i in 0..n {
            self.mean[i] += scale * with[i] * (seen.mean - believed.mean);
            let least = LEAST_LEFT * self.covariance[i * n + i];
            for j in 0..n {
                self.covariance[i * n + j] -= scale * (with[i] * with[j]);
            }
            let own = &mut self.covariance[i * n + i];
            *own = own.max(least);
        }
        off
    }

    /// Makes every number one of single precision, as it is stored, so that what is decided again from what was stored is the same.
    pub fn round(&mut self) {
        self.mean.iter_mut().chain(&mut self.covariance).for_each(|v| *v = f64::from(*v as f32));
    }

    /// Its variance grows; not by what is negative or no number.
    pub fn widen(&mut self, at: usize, variance: f64) {
        let n = self.len();
        self.covariance[at * n + at] += variance.max(0.0);
    }

    /// It returns to its prior: of what it is known to differ by the share `left` is left (an Ornstein-Uhlenbeck process).
    pub fn revert(&mut self, at: usize, prior: Normal, left: f64) {
        let n = self.len();
        let left = left.clamp(0.0, 1.0);
        self.mean[at] = prior.mean + left * (self.mean[at] - prior.mean);
        for other in 0..n {
            self.covariance[at * n + other] *= left;
            self.covariance[other * n + at] *= left;
        }
        self.covariance[at * n + at] += (1.0 - left * left) * prior.sd * prior.sd;
    }

    /// Of the quantities of another job that was like this one: those for which there is an additional variance, which they get. The others
    /// are forgotten.
    pub fn carried_over(mut self, doubt: impl Fn(&K) -> Option<f64>) -> Self {
        for at in (0..self.len()).rev() {
            match doubt(&self.keys[at]) {
                Some(variance) => self.widen(at, variance),
                None => self.remove(at),
            }
        }
        self
    }

    /// Its value moves by so much, and is known as well as before.
    pub fn shift(&mut self, at: usize, by: f64) {
        self.mean[at] += by;
    }

    /// The means of all quantities.
    pub fn means(&self) -> Vec<f64> {
        self.mean.clone()
    }

    /// Takes in an observation that is no weighted sum: `around` tells what is expected to be seen at given values of all quantities, and
    /// its derivatives there. Gauss-Newton steps to the most likely values (Bell and Cathey, The iterated Kalman filter update as a
    /// Gauss-Newton method, 1993). Answers by how many standard deviations it differs from what was believed, at these values.
    pub fn observe_curved(&mut self, seen: Normal, around: impl Fn(&[f64]) -> (Row, f64)) -> f64 {
        let mut at = self.means();
        let (mut last, mut off) = (self.clone(), 0.0);
        for _ in 0..CURVED_STEPS {
            let (row, expected) = around(&at);
            let there: f64 = row.iter().map(|(i, weight)| weight * at[*i]).sum();
            last = self.clone();
            off = last.observe(&row, Normal::new(seen.mean - expected + there, seen.sd));
            let next = last.means();
            let moved = next.iter().zip(&at).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            at = next;
            if moved < 1e-3 {
                break;
            }
        }
        *self = last;
        off
    }

    /// The same where what is seen depends on one quantity by far less at its mean than a few standard deviations above: a small term that
    /// may be a large one. Derivatives tell nothing of that, so the mean and standard deviation of this quantity are then those of
    /// its posterior by quadrature, the others at the values they were found at.
    pub fn observe_along(&mut self, along: usize, seen: Normal, around: impl Fn(&[f64]) -> (Row, f64)) -> f64 {
        let prior = self.of(along);
        let before = self.clone();
        let off = self.observe_curved(seen, &around);
        let found = self.of(along);
        if found.sd < ALONG_SD {
            return off;
        }
        let mut at = self.means();
        let (row, _) = around(&at);
        let others: Row = row.into_iter().filter(|(i, _)| *i != along).collect();
        let sd = before.sum(&others).sd.hypot(seen.sd);
        let weighted = (-ALONG..=ALONG).map(|i| {
            let z = 4.0 * f64::from(i) / f64::from(ALONG);
            at[along] = prior.mean + z * prior.sd;
            let off = (seen.mean - around(&at).1) / sd;
            (at[along], (-0.5 * (z * z + off * off)).exp())
        });
        let points: Vec<(f64, f64)> = weighted.collect();
        let total: f64 = points.iter().map(|(_, weight)| weight).sum();
        let mean = points.iter().map(|(x, weight)| weight * x).sum::<f64>() / total;
        let variance = points.iter().map(|(x, weight)| weight * (x - mean).powi(2)).sum::<f64>() / total;
        let [precision, found_precision] = [variance, found.sd * found.sd].map(f64::recip);
        let more = precision - found_precision;
        if more > 0.0 && more.is_finite() {
            let seen = (precision * mean - found_precision * found.mean) / more;
            self.observe(&[(along, 1.0)], Normal::new(seen, more.recip().sqrt()));
        }
        off
    }

    /// What is known of it counts no more: it is independent of the others and has at least this standard deviation.
    pub fn forget(&mut self, at: usize, sd: f64) {
        let n = self.len();
        let own = self.covariance[at * n + at].max(sd * sd);
        for other in 0..n {
            self.covariance[at * n + other] = 0.0;
            self.covariance[other * n + at] = 0.0;
        }
        self.covariance[at * n + at] = own;
    }

    /// Samples of all quantities: [`DRAWS`] of the first, then of the second. `from` is the first row of draws that is
    /// theirs.
    pub fn samples(&self, draws: &Draws, from: usize) -> Vec<Vec<f64>> {
        let (n, root) = (self.len(), self.root());
        let sample = |i: usize| {
            let mut all = vec![self.mean[i]; DRAWS];
            for j in 0..=i {
                let weight = root[i * n + j];
                if weight != 0.0 {
                    all.iter_mut().zip(draws.row(from + j)).for_each(|(x, z)| *x += weight * z);
                }
            }
            all
        };
        (0..n).map(sample).collect()
    }

    /// A weighted sum with what it alone differs by: a quantity where that is known, else noise as its prior has it. For
    /// [`Self::sums`].
    pub fn with_own(&self, mut row: Row, own: &K, prior: Normal) -> (Row, f64) {
        let known = self.find(own);
        row.extend(known.map(|at| (at, 1.0)));
        (row, if known.is_some() { 0.0 } else { prior.sd })
    }

    /// Samples of weighted sums of the quantities, each with noise of its own of so much standard deviation. They take
    /// [`Self::len`] rows of draws and one for each sum, from `from` on.
    pub fn sums(&self, of: &[(Row, f64)], draws: &Draws, from: usize) -> Vec<Vec<f64>> {
        let samples = self.samples(draws, from);
        let sum = |(i, (row, sd)): (usize, &(Row, f64))| {
            let own = draws.row(from + self.len() + i);
            let at = |k: usize| sd * own[k] + row.iter().map(|(at, weight)| weight * samples[*at][k]).sum::<f64>();
            (0..DRAWS).map(at).collect()
        };
        of.iter().enumerate().map(sum).collect()
    }

    /// Cholesky's lower triangle of the covariance; what rounding has made negative counts as 0.
    fn root(&self) -> Vec<f64> {
        let n = self.len();
        let mut root = vec![0.0; n * n];
        for i in 0..n {
            for j in 0..=i {
                let known: f64 = (0..j).map(|k| root[i * n + k] * root[j * n + k]).sum();
                let left = self.covariance[i * n + j] - known;
                root[i * n + j] = match (i == j, root[j * n + j]) {
                    (true, _) => left.max(0.0).sqrt(),
                    (false, pivot) if pivot * pivot > LEAST_PIVOT * self.covariance[j * n + j] => left / pivot,
                    _ => 0.0,
                };
            }
        }
        root
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{prop, prop_assert, proptest};

    #[test]
    fn one_quantity_is_the_weighted_mean_of_prior_and_observation() {
        let mut joint = Joint::default();
        let at = joint.place(&"x", Normal::new(0.0, 1.0));
        joint.observe(&[(at, 1.0)], Normal::new(1.0, 1.0));
        let now = joint.of(at);
        assert!((now.mean - 0.5).abs() < 1e-12 && (now.sd - 0.5f64.sqrt()).abs() < 1e-12, "{now:?}");
    }

    #[test]
    fn a_sum_that_is_known_ties_its_parts() {
        let mut joint = Joint::default();
        let parts = ["a", "b"].map(|key| joint.place(&key, Normal::new(0.0, 1.0)));
        let both = parts.map(|at| (at, 1.0));
        joint.observe(&both, Normal::new(2.0, 1e-6));
        assert!((joint.sum(&both).mean - 2.0).abs() < 1e-6 && joint.sum(&both).sd < 1e-5);
        assert!((joint.of(parts[0]).sd - 0.5f64.sqrt()).abs() < 1e-3, "each is known half as well");
        joint.observe(&[(parts[0], 1.0)], Normal::new(3.0, 1e-6));
        assert!((joint.of(parts[1]).mean + 1.0).abs() < 1e-3, "so the other is the rest");
    }

    #[test]
    fn an_outlier_moves_no_further_than_three_standard_deviations() {
        let moved = |to: f64| {
            let mut joint = Joint::default();
            let at = joint.place(&"x", Normal::new(0.0, 1.0));
            joint.observe(&[(at, 1.0)], Normal::new(to, 1.0));
            joint.of(at).mean
        };
        let limit = moved(OUTLIER * 2f64.sqrt());
        assert!((moved(100.0) - limit).abs() < 1e-9 && moved(1.0) < limit);
    }

    #[test]
    fn the_covariance_is_symmetric_to_the_last_bit_and_what_is_no_number_changes_nothing() {
        let mut joint = Joint::default();
        let [a, b] = ["a", "b"].map(|key| joint.place(&key, Normal::new(0.3, 1.7)));
        for value in [0.1, 50.0, -3.0, 900.0] {
            joint.observe(&[(a, 0.7), (b, 0.31)], Normal::new(value, 0.13));
        }
        assert_eq!(joint.covariance[1], joint.covariance[2]);
        let before = joint.clone();
        for (value, sd) in [(f64::NAN, 1.0), (f64::INFINITY, 1.0), (1.0, f64::NAN), (1.0, f64::INFINITY)] {
            assert_eq!(joint.observe(&[(a, 1.0)], Normal::new(value, sd)), 0.0);
        }
        assert_eq!(joint, before);
    }

    #[test]
    fn what_is_removed_leaves_the_others_as_they_are() {
        let mut joint = Joint::default();
        let all = ["a", "b", "c"].map(|key| joint.place(&key, Normal::new(1.0, 2.0)));
        joint.observe(&[(all[0], 1.0), (all[2], 1.0)], Normal::new(5.0, 0.1));
        let (before, both) = (joint.of(all[2]), joint.sum(&[(all[0], 1.0), (all[2], 1.0)]));
        joint.remove(all[1]);
        let [a, c] = ["a", "c"].map(|key| joint.find(&key).unwrap());
        assert_eq!((joint.of(c), joint.sum(&[(a, 1.0), (c, 1.0)])), (before, both));
    }

    #[test]
    fn samples_have_the_means_and_the_covariance() {
        let draws = Draws::shared();
        let mut joint = Joint::default();
        let all = ["a", "b"].map(|key| joint.place(&key, Normal::new(1.0, 1.0)));
        joint.observe(&all.map(|at| (at, 1.0)), Normal::new(3.0, 0.1));
        let samples = joint.samples(draws, 0);
        let mean = |x: &[f64]| x.iter().sum::<f64>() / x.len() as f64;
        let sums: Vec<f64> = samples[0].iter().zip(&samples[1]).map(|(a, b)| a + b).collect();
        let spread = mean(&sums.iter().map(|x| (x - mean(&sums)).powi(2)).collect::<Vec<_>>()).sqrt();
        let expected = joint.sum(&all.map(|at| (at, 1.0)));
        assert!((mean(&sums) - expected.mean).abs() < 0.02 && (spread / expected.sd - 1.0).abs() < 0.15, "{spread}");
    }

    #[test]
    fn what_is_stored_is_what_is_kept() {
        let mut joint = Joint::default();
        let all = ["a", "b", "c"].map(|key| joint.place(&key.to_owned(), Normal::new(0.1, 0.7)));
        joint.observe(&[(all[0], 1.0), (all[2], 0.3)], Normal::new(0.3, 0.1));
        joint.round();
        let text = serde_json::to_string(&joint).unwrap();
        assert_eq!(serde_json::from_str::<Joint<String>>(&text).unwrap(), joint);
        for damaged in [text.replacen("0.", "0.0,0.", 1), text.replace("\"covariance\":[", "\"covariance\":[-")] {
            assert_ne!(damaged, text);
            assert_eq!(serde_json::from_str::<Joint<String>>(&damaged).unwrap(), Joint::default());
        }
    }

    #[test]
    fn what_is_observed_of_a_curve_is_met() {
        let mut joint = Joint::default();
        let [a, b] = [("a", 0.1), ("b", 2.0)].map(|(key, sd)| joint.place(&key, Normal::new(0.0, sd)));
        // ln(e^a + 0.05 e^b), where b hardly counts at first.
        let curve = |at: &[f64]| {
            let (x, y) = (at[0].exp(), 0.05 * at[1].exp());
            (vec![(0, x / (x + y)), (1, y / (x + y))], (x + y).ln())
        };
        joint.observe_curved(Normal::new(3.0, 0.05), curve);
        let is = [a, b].map(|at| joint.of(at).mean);
        assert!((curve(&is).1 - 3.0).abs() < 0.2 && is[0].abs() < 0.1, "{is:?}");
    }

    proptest! {
        #[test]
        fn no_observation_makes_anything_less_sure(
            seen in prop::collection::vec((-3.0..3.0f64, -2.0..2.0f64, -2.0..2.0f64, 0.01..3.0f64), 1..40)
        ) {
            let mut joint = Joint::default();
            let [a, b] = ["a", "b"].map(|key| joint.place(&key, Normal::new(0.0, 1.0)));
            for (value, x, y, sd) in seen {
                let before = [joint.of(a).sd, joint.of(b).sd];
                joint.observe(&[(a, x), (b, y)], Normal::new(value, sd));
                let after = [joint.of(a), joint.of(b)];
                prop_assert!(after.iter().zip(before).all(|(now, was)| now.sd <= was + 1e-9 && now.sd >= 0.0));
                prop_assert!(after.iter().all(|now| now.mean.is_finite()));
            }
        }
    }
}
