//! Shared by the integration tests.

use flexcomm_collectives::{Schedule, allgather, allreduce, binomial_broadcast, ring_allgather};
use flexcomm_domain::{Collective, Rank};

/// One of every kind for N ranks, those that are alike once.
pub fn every_kind(n: u32) -> Vec<Schedule> {
    let sums = Collective::ALL.iter().map(|collective| (allreduce(*collective).schedule)(n).unwrap());
    let others = [
        allgather(n).unwrap(),
        ring_allgather(n).unwrap(),
        binomial_broadcast(n, Rank(0)).unwrap(),
        binomial_broadcast(n, Rank(n / 2)).unwrap(),
        binomial_broadcast(n, Rank(n - 1)).unwrap(),
    ];
    let mut all: Vec<Schedule> = Vec::new();
    for schedule in sums.chain(others) {
        if !all.contains(&schedule) {
            all.push(schedule);
        }
    }
    all
}
