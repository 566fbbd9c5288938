//! Collectives that take another time than believed on a network that has not changed. Most causes pass: once a collective is left, what it was
//! found to take returns to what is usual (an Ornstein-Uhlenbeck process), so that it is worth trying again.

use super::{BANDWIDTH_SD, CHANGE, Cause, Exchange, Key, OF_COLLECTIVE};
use flexcomm_domain::Collective;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// About a collective that takes another time on the same network, in logarithms.
const DEVIATES_SD: f64 = 1.5;
/// What it was found to take then counts for so long, seconds: most causes pass. Twice as long each time that it is found again.
const DEVIATES_S: f64 = 60.0;
const MOST_DEVIATES_S: f64 = 3600.0;
/// It deviates no longer where it is within so many of a collective's standard deviations.
const USUAL: f64 = 2.0;

/// A collective that took another time than believed, on a network that had not changed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Deviation {
    pub(super) collective: Collective,
    /// Seconds in which what it was found to take falls to 1/e of its difference from what is usual.
    lasts_s: f64,
    /// Whether the newest steps ran it: then they show what it takes.
    #[serde(default)]
    pub(super) runs: bool,
}

impl Exchange {
    /// A test after steps that were put down to the network: where tests between all nodes find the bandwidth as it was, it is the
    /// collective. A lower bound tells that only of a network that is not slower where steps are.
    pub(super) fn explain(&mut self, (from, to): (u32, u32), common: f64, is_lower_bound: bool) {
        let nodes = self.nodes();
        let Cause::Network { before, slower, same } = &mut self.cause else { return };
        let slower_by = common - *before;
        if is_lower_bound && (!*slower || slower_by > CHANGE * BANDWIDTH_SD) {
            return;
        }
        if slower_by.abs() > CHANGE * BANDWIDTH_SD {
            self.cause = Cause::None;
            self.forget_deviations();
            return;
        }
        for node in [from, to] {
            if !same.contains(&node) {
                same.push(node);
            }
        }
        if same.len() >= nodes {
            self.cause = Cause::Collective;
        }
    }

    /// How many nodes tests have been run between.
    fn nodes(&self) -> usize {
        let mut nodes: Vec<u32> = Vec::new();
        for key in self.joint.keys() {
            if let Key::Up(node) | Key::Down(node) = key
                && !nodes.contains(node)
            {
                nodes.push(*node);
            }
        }
        nodes.len()
    }

    /// A collective takes another time than believed: what was known of it does not hold.
    pub(super) fn deviates(&mut self, collective: Collective) {
        let at = self.joint.place(&Key::Collective(collective), OF_COLLECTIVE);
        self.joint.forget(at, DEVIATES_SD);
        match self.deviations.iter_mut().find(|deviation| deviation.collective == collective) {
            Some(deviation) => deviation.lasts_s = (2.0 * deviation.lasts_s).min(MOST_DEVIATES_S),
            None => self.deviations.push(Deviation { collective, lasts_s: DEVIATES_S, runs: false }),
        }
    }

    /// So many seconds have passed.
    pub(super) fn revert_deviations(&mut self, seconds: f64) {
        for deviation in self.deviations.iter().filter(|deviation| !deviation.runs) {
            if let Some(at) = self.joint.find(&Key::Collective(deviation.collective)) {
                self.joint.revert(at, OF_COLLECTIVE, (-seconds / deviation.lasts_s).exp());
            }
        }
    }

    /// On another network, as latencies or tests show it, those that deviated take what is usual, as far as is known.
    pub(super) fn forget_deviations(&mut self) {
        for deviation in std::mem::take(&mut self.deviations) {
            if let Some(at) = self.joint.find(&Key::Collective(deviation.collective)) {
                self.joint.revert(at, OF_COLLECTIVE, 0.0);
            }
        }
    }

    /// Of these collectives, those that were just seen to take what is usual deviate no longer.
    pub(super) fn end_deviations(&mut self, seen: &BTreeSet<Collective>) {
        let joint = &self.joint;
        let is_usual = |deviation: &Deviation| {
            let at = joint.find(&Key::Collective(deviation.collective));
            at.is_none_or(|at| (joint.of(at).mean - OF_COLLECTIVE.mean).abs() < USUAL * OF_COLLECTIVE.sd)
        };
        self.deviations.retain(|deviation| !(seen.contains(&deviation.collective) && is_usual(deviation)));
    }
}
