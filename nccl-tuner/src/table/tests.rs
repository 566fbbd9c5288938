use super::*;
use crate::algorithm::{NVLS_TREE, RING, TREE};
use proptest::prelude::*;

const NO: f32 = -1.0;

/// LL, LL128, Simple of tree, ring, both CollNet, NVLS, NVLS tree, PAT.
fn usual() -> Vec<f32> {
    let mut costs = vec![NO; 21];
    costs[..6].copy_from_slice(&[90.0, 50.0, 40.0, 80.0, 30.0, 35.0]);
    costs
}

/// What NCCL 2.22 to 2.30 takes: the first of the cheapest entries that are not negative.
fn old_choice(costs: &[f32]) -> Option<usize> {
    let mut best = None;
    for (at, cost) in costs.iter().enumerate() {
        if *cost >= 0.0 && best.is_none_or(|b: usize| *cost < costs[b]) {
            best = Some(at);
        }
    }
    best
}

/// What newer ones take: the cheapest of those that were allowed before the plugin was asked, last one first.
fn new_choice(before: &[f32], after: &[f32]) -> Option<usize> {
    let valid = (0..before.len()).rev().filter(|at| before[*at] >= 0.0);
    valid.reduce(|best, at| if after[at] < after[best] { at } else { best })
}

#[test]
fn the_preferred_shape_becomes_free_in_its_cheapest_protocol() {
    let mut costs = usual();
    assert_eq!(prefer(&mut costs, 3, Algorithm::Tree), Outcome::Steered { algorithm: TREE, protocol: 2 });
    let mut expected = usual();
    expected[2] = 0.0;
    assert_eq!(costs, expected, "one entry changes");
}

#[test]
fn what_nccl_would_choose_anyway_stays_as_it_is() {
    let mut costs = usual();
    assert_eq!(prefer(&mut costs, 3, Algorithm::Ring), Outcome::Same);
    assert_eq!(costs, usual());
}

#[test]
fn a_tree_may_be_the_nvls_tree() {
    let mut costs = usual();
    costs[NVLS_TREE * 3 + 2] = 20.0;
    assert_eq!(prefer(&mut costs, 3, Algorithm::Tree), Outcome::Same);
    assert_eq!(prefer(&mut costs, 3, Algorithm::Ring), Outcome::Steered { algorithm: RING, protocol: 1 });
    costs = usual();
    costs[NVLS_TREE * 3 + 2] = 38.0;
    assert_eq!(prefer(&mut costs, 3, Algorithm::Tree), Outcome::Steered { algorithm: NVLS_TREE, protocol: 2 });
}

#[test]
fn reductions_in_switch_or_network_stand() {
    for row in [COLLNET_DIRECT, COLLNET_CHAIN, NVLS] {
        let mut costs = usual();
        costs[row * 3 + 2] = 10.0;
        let before = costs.clone();
        for algorithm in [Algorithm::Tree, Algorithm::Ring] {
            assert_eq!(prefer(&mut costs, 3, algorithm), Outcome::Offloaded);
            assert_eq!(costs, before);
        }
    }
}

#[test]
fn what_is_forbidden_stays_forbidden() {
    let mut costs = usual();
    costs[..3].fill(NO);
    let before = costs.clone();
    assert_eq!(prefer(&mut costs, 3, Algorithm::Tree), Outcome::Forbidden);
    assert_eq!(costs, before);
    let mut none = vec![NO; 21];
    assert_eq!(prefer(&mut none, 3, Algorithm::Ring), Outcome::Forbidden);
    let mut odd = vec![f32::NAN, f32::INFINITY, NO, 3.0, 3.0, 3.0];
    assert_eq!(prefer(&mut odd, 3, Algorithm::Tree), Outcome::Forbidden, "NaN and infinity are no times");
}

#[test]
fn a_free_entry_of_somebody_else_stands() {
    let mut costs = usual();
    costs[RING * 3] = 0.0;
    let before = costs.clone();
    assert_eq!(prefer(&mut costs, 3, Algorithm::Tree), Outcome::Forbidden);
    assert_eq!(costs, before);
}

#[test]
fn tables_without_the_row_are_left_alone() {
    let mut only_tree = vec![5.0, 6.0, 7.0];
    assert_eq!(prefer(&mut only_tree, 3, Algorithm::Ring), Outcome::Forbidden);
    assert_eq!(only_tree, [5.0, 6.0, 7.0]);
    let mut tree_and_ring = vec![5.0, 6.0];
    assert_eq!(prefer(&mut tree_and_ring, 1, Algorithm::Ring), Outcome::Steered { algorithm: RING, protocol: 0 });
}

#[test]
fn shapes_that_cannot_be_are_refused() {
    assert_eq!(entries(7, 3), Ok(21));
    assert_eq!(entries(6, 3), Ok(18));
    for (rows, columns) in [(0, 3), (7, 0), (-1, 3), (7, -3), (i32::MAX, i32::MAX), (MOST_ENTRIES as i32 + 1, 1)] {
        let expected = TableError::Shape { algorithms: rows, protocols: columns };
        assert_eq!(entries(rows, columns), Err(expected));
    }
}

proptest! {
    /// Whatever the table: either NCCL's choice is as it was, or it has the preferred shape, was allowed before, and
    /// exactly one entry changed. For both ways of NCCL to look for the cheapest.
    #[test]
    fn nccl_takes_what_is_preferred_or_what_it_would(
        costs in prop::collection::vec(prop_oneof![Just(NO), (0.1f64..1e6).prop_map(|cost| cost as f32), Just(7.0f32)], 21),
        tree: bool,
    ) {
        let algorithm = if tree { Algorithm::Tree } else { Algorithm::Ring };
        let mut after = costs.clone();
        let changed = |after: &[f32]| costs.iter().zip(after).filter(|(a, b)| a != b).count();
        match prefer(&mut after, 3, algorithm) {
            Outcome::Steered { algorithm: row, protocol } => {
                let at = row * 3 + protocol;
                prop_assert!(algorithm.rows().contains(&row));
                prop_assert!(costs[at] >= 0.0);
                prop_assert_eq!(old_choice(&after), Some(at));
                prop_assert_eq!(new_choice(&costs, &after), Some(at));
                prop_assert_eq!(changed(&after), 1);
            }
            Outcome::Same => {
                prop_assert_eq!(changed(&after), 0);
                for choice in [old_choice(&costs), new_choice(&costs, &costs)] {
                    prop_assert!(choice.is_some_and(|at| algorithm.rows().contains(&(at / 3))));
                }
            }
            _ => prop_assert_eq!(changed(&after), 0),
        }
    }

    /// Two ranks with the same table and preference take the same entry.
    #[test]
    fn it_is_a_function(costs in prop::collection::vec((-1.0f64..100.0).prop_map(|cost| cost as f32), 21), tree: bool) {
        let algorithm = if tree { Algorithm::Tree } else { Algorithm::Ring };
        let (mut one, mut other) = (costs.clone(), costs);
        prop_assert_eq!(prefer(&mut one, 3, algorithm), prefer(&mut other, 3, algorithm));
        prop_assert_eq!(one, other);
    }
}
