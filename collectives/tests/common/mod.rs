//! Shared by the integration tests.

use flexcomm_collectives::{Schedule, allgather, binomial_broadcast, ring_allgather, ring_allreduce, tree_allreduce};
use flexcomm_domain::Rank;

/// One of every kind for N ranks.
pub fn every_kind(n: u32) -> Vec<Schedule> {
    vec![
        ring_allreduce(n).unwrap(),
        tree_allreduce(n).unwrap(),
        allgather(n).unwrap(),
        ring_allgather(n).unwrap(),
        binomial_broadcast(n, Rank(0)).unwrap(),
        binomial_broadcast(n, Rank(n / 2)).unwrap(),
        binomial_broadcast(n, Rank(n - 1)).unwrap(),
    ]
}
