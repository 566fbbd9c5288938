//! Shared by the integration tests.

use flexcomm_collectives::{Schedule, allgather, allreduce, binomial_broadcast, ring_allgather};
use flexcomm_domain::{Collective, Rank};

/// One of every kind for N ranks.
pub fn every_kind(n: u32) -> Vec<Schedule> {
    let sums = Collective::ALL.iter().filter(|collective| collective.is_allreduce());
    let mut all: Vec<Schedule> = sums.map(|collective| (allreduce(*collective).schedule)(n).unwrap()).collect();
    all.extend([
        allgather(n).unwrap(),
        ring_allgather(n).unwrap(),
        binomial_broadcast(n, Rank(0)).unwrap(),
        binomial_broadcast(n, Rank(n / 2)).unwrap(),
        binomial_broadcast(n, Rank(n - 1)).unwrap(),
    ]);
    all
}
