//! The training loss before a decision came into force and now.

use crate::{Losses, MeanLoss};
use flexcomm_domain::Version;

/// Losses that a mean goes over, and the fewest.
const MOST: usize = 24;
const LEAST: usize = 12;
/// Steps after a decision that count for neither: their gradients are of the old one, or its residual is fresh.
const SETTLING: u64 = 10;
/// So many are where a run began, if they are of such steps.
const FIRST: usize = 3;
const BEGINNING: u64 = 500;
/// Losses are not of now where more steps, and more than the mean goes over, came after them.
const STALE: u64 = 100;
/// So many losses are read for it.
pub const LOSS_POINTS: u32 = 256;

impl Losses {
    /// Of a decision that came into force at a step: `points` are steps and what they reported, oldest first, at most [`LOSS_POINTS`]. Of
    /// those before it the lowest count, since the decision before may have been a bad one, too. What is further back is no reason to doubt
    /// it any more.
    pub fn of(points: &[(u64, Option<f64>)], version: Version, from: u64) -> Option<Self> {
        let finite = |(step, loss): &(u64, Option<f64>)| Some((*step, loss.filter(|loss| loss.is_finite())?));
        let newest_first: Vec<(u64, f64)> = points.iter().rev().filter_map(finite).collect();
        let (since, before) = newest_first.split_at(newest_first.partition_point(|(step, _)| *step >= from));
        let settled = since.partition_point(|(step, _)| *step >= from.saturating_add(SETTLING));
        let newest = mean(&since[..settled.min(MOST)])?;
        let means = before.chunks(MOST).filter_map(mean);
        let began = began(points, &newest_first);
        Some(Self { version, began, before: means.min_by(|a, b| a.mean.total_cmp(&b.mean)), newest })
    }

    /// Whether losses are still reported: those of a trainer that stops reporting them, or reports NaN, stay the newest.
    pub fn is_of_now(&self, steps_taken: u64) -> bool {
        let MeanLoss { first_step, last_step, .. } = self.newest;
        steps_taken.saturating_sub(last_step) <= STALE.max(last_step - first_step)
    }

    /// By how many standard errors the newest are higher than those before.
    pub fn rise(&self) -> f64 {
        self.before.map_or(0.0, |before| self.newest.above(before))
    }
}

/// The mean of a run's first losses, while all of them are at hand. A run whose first steps have high numbers goes on with an earlier one.
fn began(points: &[(u64, Option<f64>)], newest_first: &[(u64, f64)]) -> Option<f64> {
    let is_whole = points.len() < LOSS_POINTS as usize && points.first()?.0 < BEGINNING;
    let first: Vec<f64> = newest_first.iter().rev().take(FIRST).map(|(_, loss)| *loss).collect();
    is_whole.then(|| first.iter().sum::<f64>() / first.len() as f64).filter(|mean| mean.is_finite())
}

/// None of too few.
fn mean(newest_first: &[(u64, f64)]) -> Option<MeanLoss> {
    let [(last_step, _), .., (first_step, _)] = newest_first else { return None };
    if newest_first.len() < LEAST {
        return None;
    }
    let count = newest_first.len() as f64;
    let mean = newest_first.iter().map(|(_, loss)| loss).sum::<f64>() / count;
    let variance = newest_first.iter().map(|(_, loss)| (loss - mean).powi(2)).sum::<f64>() / (count - 1.0);
    let sd = (variance / count).sqrt();
    let is_finite = mean.is_finite() && sd.is_finite();
    is_finite.then_some(MeanLoss { mean, sd, first_step: *first_step, last_step: *last_step })
}

#[cfg(test)]
mod tests {
    use super::*;

    type Point = (u64, Option<f64>);

    /// A loss per step; every other is higher and lower by 0.1.
    fn points(loss: impl Fn(u64) -> f64, steps: u64) -> Vec<Point> {
        let point = |step: u64| {
            let noise = if step.is_multiple_of(2) { 0.1 } else { -0.1 };
            (step, Some(loss(step) + noise))
        };
        (0..steps).map(point).collect()
    }

    #[test]
    fn a_loss_that_rises_rises_by_many_standard_errors_and_one_that_falls_by_none() {
        let rise = |loss: fn(u64) -> f64| Losses::of(&points(loss, 160), Version(3), 100).unwrap().rise();
        assert!(rise(|_| 1.0).abs() < 0.5);
        assert!(rise(|step| 1.0 - 1e-3 * step as f64) < -2.0);
        assert!(rise(|step| if step < 100 { 1.0 } else { 1.3 }) > 10.0);
    }

    #[test]
    fn the_lowest_loss_before_counts() {
        // It rose under the decision before this one already.
        let loss = |step| if (40..90).contains(&step) { 1.0 } else { 1.5 };
        let found = Losses::of(&points(loss, 240), Version(3), 160).unwrap();
        assert_eq!((found.newest.first_step, found.newest.last_step), (216, 239));
        assert_eq!(found.before.unwrap().mean, 1.0);
        assert!(found.rise() > 10.0, "{found:?}");
    }

    #[test]
    fn where_a_run_began_is_known_at_its_beginning() {
        let loss = |step| if step < 3 { 2.0 } else { 1.0 };
        let began = |points: &[Point]| Losses::of(points, Version(3), 100).unwrap().began;
        let all = points(loss, 400);
        assert!((began(&all[..160]).unwrap() - 2.0).abs() < 0.1);
        assert_eq!(began(&all[144..]), None, "of more than are read");
        let later: Vec<Point> = all[..160].iter().map(|p| (p.0 + 500, p.1)).collect();
        assert_eq!(Losses::of(&later, Version(3), 600).unwrap().began, None, "it goes on with an earlier run");
    }

    #[test]
    fn losses_that_are_reported_no_more_are_not_of_now() {
        let found = Losses::of(&points(|_| 1.0, 160), Version(3), 100).unwrap();
        assert!(found.is_of_now(259) && !found.is_of_now(260));
        // One in a hundred steps.
        let newest = MeanLoss { first_step: 0, last_step: 2300, ..found.newest };
        assert!(Losses { newest, ..found }.is_of_now(2700));
    }

    #[test]
    fn too_few_losses_tell_nothing() {
        let of = |steps, from| Losses::of(&points(|_| 1.0, steps), Version(3), from);
        assert_eq!(of(100, 95), None, "only five steps of it");
        assert_eq!(of(122, 100).unwrap().newest.mean, 1.0);
        assert_eq!(of(60, 5).unwrap().before, None, "five steps before it");
        assert_eq!(Losses::of(&[], Version(3), 5), None);
        let bad: Vec<Point> = points(|_| 1.0, 160).into_iter().map(|p| (p.0, Some(f64::NAN))).collect();
        assert_eq!(Losses::of(&bad, Version(3), 100), None);
    }
}
