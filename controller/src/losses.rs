//! The training loss before a decision came into force and now. Pure.

use crate::store::ProgressRow;
use flexcomm_domain::Version;
use flexcomm_planner::{Losses, MeanLoss};

/// Losses that a mean goes over, and the fewest.
const MOST: usize = 24;
const LEAST: usize = 12;
/// Steps after a decision that count for neither: their gradients are of the old one, or its residual is fresh.
const SETTLING: u64 = 10;
/// So many losses are read for it.
pub const POINTS: u32 = 256;

/// Of a decision that came into force at a step. What is further back than [`POINTS`] is no reason to doubt it any more.
pub fn losses(points: &[ProgressRow], version: Version, from: u64) -> Option<Losses> {
    let newest = mean(points.iter().rev().filter(|point| point.step >= from.saturating_add(SETTLING)))?;
    let before = mean(points.iter().rev().filter(|point| point.step < from));
    Some(Losses { version, before, newest })
}

/// Of the first that are finite.
fn mean<'a>(points: impl Iterator<Item = &'a ProgressRow>) -> Option<MeanLoss> {
    let losses: Vec<f64> = points.filter_map(|point| point.loss).filter(|loss| loss.is_finite()).take(MOST).collect();
    if losses.len() < LEAST {
        return None;
    }
    let count = losses.len() as f64;
    let mean = losses.iter().sum::<f64>() / count;
    let variance = losses.iter().map(|loss| (loss - mean).powi(2)).sum::<f64>() / (count - 1.0);
    let sd = (variance / count).sqrt();
    (mean.is_finite() && sd.is_finite()).then_some(MeanLoss { mean, sd })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A loss per step; every other is higher and lower by 0.1.
    fn points(loss: impl Fn(u64) -> f64, steps: u64) -> Vec<ProgressRow> {
        let point = |step: u64| {
            let noise = if step.is_multiple_of(2) { 0.1 } else { -0.1 };
            ProgressRow { step, at_us: step, loss: Some(loss(step) + noise), accuracy: None }
        };
        (0..steps).map(point).collect()
    }

    #[test]
    fn a_loss_that_rises_rises_by_many_standard_errors_and_one_that_falls_by_none() {
        let rise = |loss: fn(u64) -> f64| losses(&points(loss, 160), Version(3), 100).unwrap().rise();
        assert!(rise(|_| 1.0).abs() < 0.5);
        assert!(rise(|step| 1.0 - 1e-3 * step as f64) < -2.0);
        assert!(rise(|step| if step < 100 { 1.0 } else { 1.3 }) > 10.0);
    }

    #[test]
    fn too_few_losses_tell_nothing() {
        let of = |steps, from| losses(&points(|_| 1.0, steps), Version(3), from);
        assert_eq!(of(100, 95), None, "only five steps of it");
        assert_eq!(of(122, 100).unwrap().newest.mean, 1.0);
        assert_eq!(of(60, 5).unwrap().before, None, "five steps before it");
        assert_eq!(losses(&[], Version(3), 5), None);
        let bad: Vec<ProgressRow> =
            points(|_| 1.0, 160).into_iter().map(|p| ProgressRow { loss: Some(f64::NAN), ..p }).collect();
        assert_eq!(losses(&bad, Version(3), 100), None);
    }
}
