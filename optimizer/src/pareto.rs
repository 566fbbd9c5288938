//! Dominance, the Pareto front, and the volume it dominates.

use crate::Evaluated;

/// Whether `a` is nowhere worse than `b` and somewhere better. NaN dominates nothing.
pub fn dominates(a: &[f64; 3], b: &[f64; 3]) -> bool {
    a.iter().zip(b).all(|(x, y)| x <= y) && a.iter().zip(b).any(|(x, y)| x < y)
}

/// Indices of the points that no other dominates, in their given order. Of equal points the first stays;
/// points with a NaN or infinity are never on the front.
pub fn front_of(points: &[[f64; 3]]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..points.len()).filter(|&i| points[i].iter().all(|v| v.is_finite())).collect();
    let compare = |&a: &usize, &b: &usize| {
        let by_value = points[a].iter().zip(&points[b]).map(|(x, y)| x.total_cmp(y));
        by_value.fold(std::cmp::Ordering::Equal, std::cmp::Ordering::then).then(a.cmp(&b))
    };
    order.sort_by(compare);
    // Sorted, a point can only be dominated by (or equal to) an earlier one that is kept.
    let mut kept: Vec<usize> = Vec::new();
    for i in order {
        if !kept.iter().any(|&k| points[k].iter().zip(&points[i]).all(|(x, y)| x <= y)) {
            kept.push(i);
        }
    }
    kept.sort_unstable();
    kept
}

/// Indices of the candidates on the Pareto front of (t_comp, t_sync, 1/gain).
pub fn front(candidates: &[Evaluated]) -> Vec<usize> {
    let points: Vec<[f64; 3]> = candidates.iter().map(Evaluated::objectives).collect();
    front_of(&points)
}

/// Volume dominated by `points` within the box that ends at `reference` (all minimised). Points outside
/// the box count for nothing. O(n² log n): slices along the third objective.
#[cfg(test)]
pub(crate) fn hypervolume(points: &[[f64; 3]], reference: [f64; 3]) -> f64 {
    let mut inside: Vec<[f64; 3]> =
        points.iter().copied().filter(|p| p.iter().zip(&reference).all(|(x, r)| x < r)).collect();
    inside.sort_by(|a, b| a[2].total_cmp(&b[2]));
    let mut volume = 0.0;
    // (x, y) of the points so far that no other of them dominates in the plane: x rises, y falls.
    let mut stairs: Vec<(f64, f64)> = Vec::new();
    for (i, p) in inside.iter().enumerate() {
        step_in(&mut stairs, (p[0], p[1]));
        let next = inside.get(i + 1).map_or(reference[2], |q| q[2]);
        if next > p[2] {
            volume += area(&stairs, reference) * (next - p[2]);
        }
    }
    volume
}

#[cfg(test)]
fn step_in(stairs: &mut Vec<(f64, f64)>, p: (f64, f64)) {
    if stairs.iter().any(|s| s.0 <= p.0 && s.1 <= p.1) {
        return;
    }
    stairs.retain(|s| !(p.0 <= s.0 && p.1 <= s.1));
    let at = stairs.partition_point(|s| s.0 < p.0);
    stairs.insert(at, p);
}

#[cfg(test)]
fn area(stairs: &[(f64, f64)], reference: [f64; 3]) -> f64 {
    let mut top = reference[1];
    let mut sum = 0.0;
    for &(x, y) in stairs {
        sum += (reference[0] - x) * (top - y);
        top = y;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{prop::collection::vec, prop_assert, prop_assert_eq, proptest};

    #[test]
    fn equal_points_and_nan() {
        let points =
            [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [f64::NAN, 0.0, 0.0], [0.0, 2.0, f64::INFINITY], [0.5, 2.0, 1.0]];
        assert_eq!(front_of(&points), vec![0, 4]);
        assert!(!dominates(&points[2], &points[0]) && !dominates(&points[0], &points[2]));
        assert!(front_of(&[]).is_empty());
    }

    #[test]
    fn volumes_by_hand() {
        assert_eq!(hypervolume(&[[0.0; 3]], [1.0; 3]), 1.0);
        assert_eq!(hypervolume(&[[0.5, 0.5, 0.5], [2.0, 0.0, 0.0]], [1.0; 3]), 0.125);
        let two = hypervolume(&[[0.0, 0.5, 0.0], [0.5, 0.0, 0.0]], [1.0; 3]);
        assert!((two - 0.75).abs() < 1e-12, "{two}");
        let stacked = hypervolume(&[[0.0, 0.0, 0.5], [0.5, 0.5, 0.0]], [1.0; 3]);
        assert!((stacked - (0.5 + 0.25 * 0.5)).abs() < 1e-12, "{stacked}");
    }

    proptest! {
        #[test]
        fn front_is_exactly_the_undominated(points in vec([0u8..6, 0u8..6, 0u8..6], 0..60)) {
            let points: Vec<[f64; 3]> = points.into_iter().map(|p| p.map(f64::from)).collect();
            let front = front_of(&points);
            for (i, p) in points.iter().enumerate() {
                let beaten = points.iter().enumerate().any(|(j, q)| dominates(q, p) || (q == p && j < i));
                prop_assert_eq!(front.contains(&i), !beaten);
            }
        }

        #[test]
        fn volume_is_that_of_the_unit_cells(points in vec([0u8..5, 0u8..5, 0u8..5], 0..12)) {
            let cell_hit = |x: u8, y: u8, z: u8| points.iter().any(|p| p[0] <= x && p[1] <= y && p[2] <= z);
            let cells = (0..5u8).flat_map(|x| (0..5u8).flat_map(move |y| (0..5u8).map(move |z| (x, y, z))));
            let expected = cells.filter(|&(x, y, z)| cell_hit(x, y, z)).count() as f64;
            let points: Vec<[f64; 3]> = points.iter().map(|p| p.map(f64::from)).collect();
            prop_assert!((hypervolume(&points, [5.0; 3]) - expected).abs() < 1e-9);
        }
    }
}
