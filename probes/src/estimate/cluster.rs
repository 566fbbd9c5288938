//! The lowest value that enough samples agree with.

use crate::stats::{median, nearest_rank};

/// What counts as agreement.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rule {
    /// Share of the samples that must agree.
    pub(super) share: f64,
    /// Values this much above the lowest one (as a share) still belong to the cluster once it is found.
    pub(super) spread: f64,
    /// Values this much above belong in any case: the clock's and the scheduler's grain.
    pub(super) grain: f64,
}

/// A cluster that was found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Cluster {
    /// Its median.
    pub(super) value: f64,
    /// How many samples it has.
    pub(super) support: usize,
}

/// Fewer samples than this support nothing.
const LEAST_SUPPORT: usize = 3;
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
    let start = WIDTHS.iter().find_map(|width| first_supported(&sorted, need, *width, rule.grain));
    let Some(start) = start else {
        return nearest_rank(&sorted, FALLBACK_QUANTILE).map(|value| Cluster { value, support: LEAST_SUPPORT });
    };
    let top = sorted[start] * (1.0 + rule.spread) + rule.grain;
    let end = sorted.partition_point(|v| *v <= top);
    let cluster = &sorted[start..end];
    median(cluster).map(|value| Cluster { value, support: cluster.len() })
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

    #[test]
    fn small_and_scattered_sets_give_something() {
        assert_eq!(lowest(&[], RULE), None);
        assert_eq!(lowest(&[2.0], RULE).unwrap().value, 2.0);
        assert_eq!(lowest(&[1.0, 10.0, 100.0, 1000.0], RULE).unwrap().value, 1.0);
    }
}
