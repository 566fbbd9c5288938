//! From curves to scores: seconds to a target, ratios between settings, and how sure they are.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;

/// A test loss after so many steps.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Point {
    /// Steps done.
    pub steps: u64,
    /// Loss over all images that are held out.
    pub loss: f64,
}

/// What a run has learned by then: the losses smoothed over three points, and never rising.
pub fn smooth(points: &[Point]) -> Vec<Point> {
    let mean = |at: usize| {
        let near = &points[at.saturating_sub(1)..points.len().min(at + 2)];
        near.iter().map(|point| point.loss).sum::<f64>() / near.len() as f64
    };
    let mut least = f64::INFINITY;
    let fall = |(at, point): (usize, &Point)| {
        // A loss that is not finite has learned nothing.
        let loss = mean(at);
        least = if loss.is_finite() { least.min(loss) } else { least };
        Point { steps: point.steps, loss: least }
    };
    points.iter().enumerate().map(fall).collect()
}

/// After how many steps a smoothed curve reaches a loss, between its points by a straight line; none where it does not.
pub fn steps_to(curve: &[Point], target: f64) -> Option<f64> {
    let at = curve.iter().position(|point| point.loss <= target)?;
    let (Some(before), here) = (at.checked_sub(1).map(|before| curve[before]), curve[at]) else {
        return Some(curve[at].steps as f64);
    };
    if !before.loss.is_finite() {
        return Some(here.steps as f64);
    }
    let share = (before.loss - target) / (before.loss - here.loss);
    Some(before.steps as f64 + share * (here.steps - before.steps) as f64)
}

/// What dense has reached when this share of its steps is done: the target of all.
pub fn target(dense: &[Point], share: f64) -> Option<f64> {
    let steps = dense.last()?.steps as f64 * share;
    let after = dense.iter().position(|point| point.steps as f64 >= steps)?;
    let here = dense[after];
    let Some(before) = after.checked_sub(1).map(|at| dense[at]).filter(|before| before.loss.is_finite()) else {
        return Some(here.loss);
    };
    let part = (steps - before.steps as f64) / (here.steps - before.steps) as f64;
    Some(before.loss + part * (here.loss - before.loss))
}

/// Seconds at a fractional number of steps, by the seconds at which each step ended.
pub fn seconds_at(ends: &[f64], steps: f64) -> Option<f64> {
    if steps <= 0.0 {
        return Some(0.0);
    }
    let whole = steps.floor() as usize;
    let at = |count: usize| if count == 0 { Some(0.0) } else { ends.get(count - 1).copied() };
    let (from, share) = (at(whole)?, steps - whole as f64);
    if share == 0.0 {
        return Some(from);
    }
    Some(from + share * (at(whole + 1)? - from))
}

/// exp of the mean of logarithms; none of no ratios.
pub fn geometric_mean(ratios: impl IntoIterator<Item = f64>) -> Option<f64> {
    let (sum, count) = ratios.into_iter().fold((0.0, 0u32), |(sum, count), ratio| (sum + ratio.ln(), count + 1));
    (count > 0).then(|| (sum / f64::from(count)).exp())
}

/// How far two positive numbers are apart, as a share of the smaller one: twice as much and half as much are both 1.
pub fn apart(a: f64, b: f64) -> f64 {
    (a / b).ln().abs().exp() - 1.0
}

/// The value below which this share of the values lies, between ranks by a straight line; none of no values.
pub fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    let at = share.clamp(0.0, 1.0) * last as f64;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    Some(low + (at - at.floor()) * (high - low))
}

/// An interval around a mean.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Interval {
    /// 2.5 % of the resamples lie below it.
    pub low: f64,
    /// 2.5 % lie above it.
    pub high: f64,
}

/// Half of the 95 % interval of a geometric mean of few ratios, as a logarithm, by Student's t; none of fewer than two. The bootstrap
/// of three values covers but three quarters.
pub fn half_width(ratios: &[f64]) -> Option<f64> {
    /// 97.5 % quantiles for 1, 2, ... degrees of freedom.
    const T: [f64; 10] = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228];
    let (count, freedom) = (ratios.len() as f64, ratios.len().checked_sub(1).filter(|freedom| *freedom > 0)?);
    let mean = mean(ratios.iter().map(|ratio| ratio.ln()));
    let squares: f64 = ratios.iter().map(|ratio| (ratio.ln() - mean).powi(2)).sum();
    Some(T[freedom.min(T.len()) - 1] * (squares / freedom as f64 / count).sqrt())
}

/// A cell's ratios.
#[derive(Debug, Clone, PartialEq)]
pub struct CellRatios {
    /// Its job without the seed. Cells of one job have the same fixed settings' curves: chance that is in one is in all.
    pub job: String,
    /// By seed. A cell without any counts as none.
    pub ratios: Vec<f64>,
}

/// Cells by family.
pub type Families = Vec<Vec<CellRatios>>;

/// Of each family that has one its cells that have ratios.
fn filled(families: &Families) -> Vec<Vec<&CellRatios>> {
    fn cells(family: &[CellRatios]) -> Vec<&CellRatios> {
        family.iter().filter(|cell| !cell.ratios.is_empty()).collect()
    }
    families.iter().map(|family| cells(family)).filter(|family| !family.is_empty()).collect()
}

/// A mean of logarithms; 0 of none.
fn mean(logs: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = logs.len().max(1) as f64;
    logs.sum::<f64>() / count
}

/// The geometric mean over families of that over their cells of that over their seeds; none of no ratios.
pub fn mean_of_families(families: &Families) -> Option<f64> {
    let families = filled(families);
    let of_cell = |cell: &&CellRatios| mean(cell.ratios.iter().map(|ratio| ratio.ln()));
    let of_family = |family: &Vec<&CellRatios>| mean(family.iter().map(of_cell));
    (!families.is_empty()).then(|| mean(families.iter().map(of_family)).exp())
}

/// The bootstrap's 95 % interval of [`mean_of_families`]: a family's cells are drawn with replacement, and the seeds of each job, for all
/// of its cells at once.
pub fn bootstrap(families: &Families, seed: u64) -> Option<Interval> {
    const RESAMPLES: usize = 2000;
    let families = filled(families);
    if families.is_empty() {
        return None;
    }
    let (mut of_seeds, mut of_cells) = (ChaCha8Rng::seed_from_u64(seed), ChaCha8Rng::seed_from_u64(!seed));
    let mut resample = || {
        let mut drawn: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        let mut logs = Vec::new();
        for family in &families {
            let mut of_cell = |_| {
                let CellRatios { job, ratios } = family[of_cells.random_range(0..family.len())];
                let drawn = drawn.entry(job).or_default();
                drawn.extend((drawn.len()..ratios.len()).map(|_| of_seeds.random::<f64>()));
                mean(drawn[..ratios.len()].iter().map(|at| ratios[(at * ratios.len() as f64) as usize].ln()))
            };
            logs.push(mean((0..family.len()).map(&mut of_cell)));
        }
        mean(logs.into_iter()).exp()
    };
    let means: Vec<f64> = (0..RESAMPLES).map(|_| resample()).collect();
    Some(Interval { low: quantile(&means, 0.025)?, high: quantile(&means, 0.975)? })
}

/// Kendall's rank correlation of two lists of scores of the same settings (tau-a): 1 in the same order, -1 in reverse.
pub fn kendall(a: &[f64], b: &[f64]) -> Option<f64> {
    let n = a.len();
    if n != b.len() || n < 2 {
        return None;
    }
    let pairs = (0..n).flat_map(|i| (i + 1..n).map(move |j| (i, j)));
    let sign = |(i, j): (usize, usize)| {
        ((a[i] - a[j]) * (b[i] - b[j])).signum() * f64::from(u8::from(a[i] != a[j] && b[i] != b[j]))
    };
    Some(pairs.map(sign).sum::<f64>() / (n * (n - 1) / 2) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn curve(losses: &[f64]) -> Vec<Point> {
        (0..).step_by(25).zip(losses).map(|(steps, loss)| Point { steps, loss: *loss }).collect()
    }

    #[test]
    fn curves_are_smoothed_and_never_rise() {
        let smoothed = smooth(&curve(&[3.0, 1.0, 2.0, f64::NAN, 0.3]));
        assert_eq!(smoothed.iter().map(|point| point.loss).collect::<Vec<_>>(), [2.0, 2.0, 2.0, 2.0, 2.0]);
        let smoothed = smooth(&curve(&[3.0, 2.0, 1.0, 0.0]));
        assert_eq!(smoothed.iter().map(|point| point.loss).collect::<Vec<_>>(), [2.5, 2.0, 1.0, 0.5]);
    }

    #[test]
    fn targets_are_met_between_points() {
        let dense = curve(&[2.0, 1.0, 0.5]);
        assert_eq!(target(&dense, 0.75), Some(0.75));
        assert_eq!(
            (steps_to(&dense, 0.75), steps_to(&dense, 2.0), steps_to(&dense, 0.4)),
            (Some(37.5), Some(0.0), None)
        );
        let ends = [1.0, 2.0, 4.0];
        assert_eq!(
            [0.0, 1.0, 2.5, 3.0, 3.5].map(|s| seconds_at(&ends, s)),
            [Some(0.0), Some(1.0), Some(3.0), Some(4.0), None]
        );
    }

    #[test]
    fn twice_as_much_is_as_far_as_half() {
        assert!([apart(2.0, 1.0), apart(1.0, 2.0)].iter().all(|share| (share - 1.0).abs() < 1e-12));
        assert_eq!(apart(3.0, 3.0), 0.0);
    }

    #[test]
    fn few_ratios_have_a_wide_interval() {
        let logs = [0.0f64, 0.05, 0.1];
        // A standard deviation of 0.05, of the mean 0.05 / √3.
        let half = half_width(&logs.map(f64::exp)).unwrap();
        assert!((half - 4.303 * 0.05 / 3f64.sqrt()).abs() < 1e-9, "{half}");
        assert!(half_width(&[1.0]).is_none() && half_width(&[2.0; 30]).unwrap() < 1e-12);
    }

    #[test]
    fn ranks_and_quantiles() {
        assert_eq!(kendall(&[1.0, 2.0, 3.0], &[1.0, 2.0, 3.0]), Some(1.0));
        assert_eq!(kendall(&[1.0, 2.0, 3.0], &[3.0, 2.0, 1.0]), Some(-1.0));
        assert_eq!(kendall(&[1.0, 2.0, 3.0], &[2.0, 1.0, 3.0]), Some(1.0 / 3.0));
        assert_eq!(
            (quantile(&[4.0, 1.0, 2.0], 0.5), quantile(&[1.0, 2.0], 0.95), quantile(&[], 0.5)),
            (Some(2.0), Some(1.95), None)
        );
    }

    fn cell(job: &str, ratios: &[f64]) -> CellRatios {
        CellRatios { job: job.to_owned(), ratios: ratios.to_vec() }
    }

    /// A family of one cell counts as much as one of three, and resampling never mixes families.
    #[test]
    fn families_count_alike() {
        let first = vec![cell("a", &[4.0]), cell("b", &[4.0, 4.0]), cell("c", &[])];
        let families = vec![first, vec![cell("d", &[0.5, 2.0])], vec![]];
        assert!((mean_of_families(&families).unwrap() - 2.0).abs() < 1e-12);
        let interval = bootstrap(&families, 1).unwrap();
        // The second family's seeds are drawn twice: both 0.5 or both 2.
        assert!((interval.low - 2f64.sqrt()).abs() < 1e-12 && (interval.high - 8f64.sqrt()).abs() < 1e-12);
        assert_eq!((mean_of_families(&vec![vec![cell("a", &[])]]), bootstrap(&vec![], 1)), (None, None));
    }

    /// Cells of one job are as wide as one of them: another would tell nothing new. Those of other jobs are not.
    #[test]
    fn what_cells_share_does_not_narrow_the_interval() {
        let width = |jobs: [&str; 4]| {
            let interval = bootstrap(&vec![jobs.map(|job| cell(job, &[0.5, 1.0, 2.0])).to_vec()], 1).unwrap();
            (interval.high / interval.low).ln()
        };
        let one = bootstrap(&vec![vec![cell("a", &[0.5, 1.0, 2.0])]], 1).unwrap();
        assert!((width(["a"; 4]) - (one.high / one.low).ln()).abs() < 1e-9);
        assert!(width(["a", "b", "c", "d"]) < 0.8 * width(["a"; 4]));
    }

    proptest! {
        #[test]
        fn the_interval_holds_the_mean_and_shrinks_to_it(ratios in prop::collection::vec(0.2f64..5.0, 3..30)) {
            let groups: Vec<CellRatios> = ratios.iter().map(|ratio| cell(&ratio.to_string(), &[*ratio])).collect();
            let mean = geometric_mean(ratios.iter().copied()).unwrap();
            let families = vec![groups];
            prop_assert!((mean_of_families(&families).unwrap() / mean - 1.0).abs() < 1e-9);
            let interval = bootstrap(&families, 1).unwrap();
            prop_assert!(interval.low <= mean * 1.001 && mean <= interval.high * 1.001, "{interval:?} {mean}");
            let same = bootstrap(&vec![vec![cell("a", &[mean; 3]); 5]; 2], 1).unwrap();
            prop_assert!((same.low / mean - 1.0).abs() < 1e-9 && (same.high / mean - 1.0).abs() < 1e-9);
        }
    }
}
