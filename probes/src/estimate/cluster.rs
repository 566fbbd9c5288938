//! The lowest value that enough samples agree with.

use crate::stats::{median, nearest_rank};

/// What counts as agreement.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rule {
    /// Share of the samples that must agree.
    pub(super) share: f64,
    /// Values this much above the lowest one (as a share) still support the cluster once it is found.
    pub(super) spread: f64,
    /// Values this much above belong in any case: the clock's and the scheduler's grain.
    pub(super) grain: f64,
}

/// A cluster that was found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Cluster {
    /// The median of its floor: of the values as near to the lowest as those are that found it.
    pub(super) value: f64,
    /// How many samples agree with it.
    pub(super) support: usize,
}

/// Fewer samples than this support nothing.
const LEAST_SUPPORT: usize = 3;
/// Fewer than this are no sharp end: four of a queue's scattered values fall together once in some hours.
const LEAST_SHARP: usize = 5;
/// Tried from narrow to wide: a sharp floor is found sharply, a noisy one still is found.
const WIDTHS: [f64; 4] = [0.05, 0.1, 0.2, 0.4];
/// Where no cluster exists at all.
const FALLBACK_QUANTILE: f64 = 0.25;

/// Finds the lowest supported cluster among positive values; `None` without values.
pub(super) fn lowest(values: &[f64], rule: Rule) -> Option<Cluster> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let need = ((rule.share * sorted.len() as f64).ceil() as usize).max(LEAST_SUPPORT);
    if sorted.len() < LEAST_SUPPORT {
        return median(&sorted).map(|value| Cluster { value, support: sorted.len() });
    }
    let found = WIDTHS.into_iter().find_map(|width| Some((first_supported(&sorted, need, width, rule.grain)?, width)));
    let Some((start, width)) = found else {
        return nearest_rank(&sorted, FALLBACK_QUANTILE).map(|value| Cluster { value, support: LEAST_SUPPORT });
    };
    let within = |spread: f64| {
        let top = sorted[start] * (1.0 + spread) + rule.grain;
        &sorted[start..sorted.partition_point(|v| *v <= top)]
    };
    // What is slower than a sharp floor but agrees with it was slowed down a little: it is a witness, not the value.
    let value = median(within(width.min(rule.spread)))?;
    Some(Cluster { value, support: within(rule.spread).len() })
}

/// Whether the lowest values end as sharply as a wire's latency does: enough of them lie within the rule's spread above
/// the second lowest. A queue scatters there. The lowest alone may be a clock's fault.
pub(super) fn ends_sharply(values: &[f64], rule: Rule) -> bool {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(floor) = sorted.get(1) else { return false };
    let need = ((rule.share * sorted.len() as f64).ceil() as usize).max(LEAST_SHARP);
    let top = floor * (1.0 + rule.spread) + rule.grain;
    sorted.partition_point(|v| *v <= top) >= need
}

fn first_supported(sorted: &[f64], need: usize, width: f64, grain: f64) -> Option<usize> {
    let last = sorted.len().checked_sub(need)?;
    (0..=last).find(|i| sorted[i + need - 1] <= sorted[*i] * (1.0 + width) + grain)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: Rule = Rule { share: 0.1, spread: 0.1, grain: 0.0 };

    #[test]
    fn single_low_values_find_no_support() {
        let mut values = vec![0.1, 0.3];
        values.extend((0..10).map(|i| 1.0 + 0.001 * f64::from(i)));
        values.extend((0..30).map(|i| 5.0 + f64::from(i)));
        let found = lowest(&values, RULE).unwrap();
        assert!((found.value - 1.0045).abs() < 1e-9, "{found:?}");
        assert_eq!(found.support, 10);
    }

    /// A floor of 10 with many samples that were slowed down a little: they do not move it, and they count as support.
    #[test]
    fn a_sharp_floor_is_the_value_of_a_wide_cluster() {
        let mut values: Vec<f64> = (0..10).map(|i| 1.0 + 0.004 * f64::from(i)).collect();
        values.extend((0..40).map(|i| 1.06 + 0.0009 * f64::from(i)));
        let found = lowest(&values, RULE).unwrap();
        assert!((found.value - 1.018).abs() < 1e-9, "{found:?}");
        assert_eq!(found.support, 50);
    }

    #[test]
    fn small_and_scattered_sets_give_something() {
        assert_eq!(lowest(&[], RULE), None);
        assert_eq!(lowest(&[2.0], RULE).unwrap().value, 2.0);
        assert_eq!(lowest(&[1.0, 10.0, 100.0, 1000.0], RULE).unwrap().value, 1.0);
    }
}
