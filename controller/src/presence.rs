//! Which agents are there: in memory only, since heartbeats and reports fill it again within a second of a restart.

use flexcomm_domain::{NodeName, Timestamp};
use flexcomm_wire::{Heartbeat, HostSeen};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::Duration;

/// What is known of an agent.
#[derive(Debug, Clone, PartialEq)]
pub struct Seen {
    /// The process that owns the name.
    pub instance: u64,
    /// When it was heard of last.
    pub last: Timestamp,
    /// Reports waiting in its spool.
    pub spooled: u64,
    /// Epoch of the orders it follows.
    pub epoch: u64,
    /// What it sees of hosts that are no nodes.
    pub hosts: Vec<HostSeen>,
}

/// Agents by name.
#[derive(Debug)]
pub struct Presence {
    dead_after: Duration,
    seen: Mutex<BTreeMap<NodeName, Seen>>,
}

impl Presence {
    /// Nobody is there.
    pub fn new(dead_after: Duration) -> Self {
        Self { dead_after, seen: Mutex::default() }
    }

    fn fresh(&self, seen: &Seen, now: Timestamp) -> bool {
        now.since(seen.last).get() < self.dead_after.as_secs_f64()
    }

    /// Takes a name for an instance, which knows the instances that it was before. Refused with the time since the
    /// owner was heard of, when that is none of them and alive.
    pub fn claim(&self, node: &NodeName, (instance, previous): (u64, &[u64]), now: Timestamp) -> Result<(), f64> {
        let mut all = self.seen.lock();
        let same = |owner: &Seen| owner.instance == instance || previous.contains(&owner.instance);
        match all.get(node) {
            Some(owner) if !same(owner) && self.fresh(owner, now) => Err(now.since(owner.last).get()),
            _ => {
                all.insert(node.clone(), Seen { instance, last: now, spooled: 0, epoch: 0, hosts: Vec::new() });
                Ok(())
            }
        }
    }

    /// Takes note of a sign of life; false when the name is unknown or another instance's.
    pub fn saw(&self, node: &NodeName, instance: u64, now: Timestamp) -> bool {
        let mut all = self.seen.lock();
        let own = all.get_mut(node).filter(|s| s.instance == instance);
        own.map(|seen| seen.last = now).is_some()
    }

    /// Takes note of a heartbeat; false when the name is unknown or another instance's.
    pub fn heartbeat(&self, node: &NodeName, beat: &Heartbeat, now: Timestamp) -> bool {
        let mut all = self.seen.lock();
        let own = all.get_mut(node).filter(|s| s.instance == beat.instance);
        let note = |seen: &mut Seen| {
            // A sign of life is one, whatever hosts it lists.
            let hosts = if beat.check().is_ok() { beat.hosts.clone() } else { Vec::new() };
            let instance = seen.instance;
            *seen = Seen { instance, last: now, spooled: beat.spooled, epoch: beat.orders_epoch, hosts };
        };
        own.map(note).is_some()
    }

    /// Forgets a name.
    pub fn forget(&self, node: &NodeName) {
        self.seen.lock().remove(node);
    }

    /// What is known of one agent, and whether it is alive.
    pub fn get(&self, node: &NodeName, now: Timestamp) -> Option<(Seen, bool)> {
        let seen = self.seen.lock().get(node).cloned()?;
        let is_fresh = self.fresh(&seen, now);
        Some((seen, is_fresh))
    }

    /// Agents that are alive.
    pub fn live(&self, now: Timestamp) -> Vec<NodeName> {
        self.seen.lock().iter().filter(|(_, seen)| self.fresh(seen, now)).map(|(node, _)| node.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_one_live_owner() {
        let presence = Presence::new(Duration::from_secs(5));
        let node = NodeName::new("a").unwrap();
        let at = |s: u64| Timestamp(s * 1_000_000);
        let claim = |instance, previous: &[u64], now| presence.claim(&node, (instance, previous), now);
        claim(1, &[], at(0)).unwrap();
        assert_eq!(claim(2, &[], at(4)), Err(4.0));
        assert!(presence.saw(&node, 1, at(4)));
        assert!(!presence.saw(&node, 2, at(4)));
        assert!(claim(2, &[7, 3], at(8)).is_err());
        claim(1, &[], at(8)).unwrap();
        assert_eq!(presence.live(at(12)), std::slice::from_ref(&node));
        claim(2, &[], at(13)).unwrap();
        let beat = Heartbeat { instance: 1, now_us: u64::MAX, orders_epoch: 0, spooled: 3, hosts: Vec::new() };
        assert!(!presence.heartbeat(&node, &beat, at(14)));
        assert!(presence.heartbeat(&node, &Heartbeat { instance: 2, ..beat.clone() }, at(14)));
        assert_eq!(presence.get(&node, at(14)).unwrap().0.spooled, 3);
        claim(3, &[1, 2], at(14)).unwrap();
        assert!(claim(2, &[1], at(14)).is_err(), "the one that was replaced does not come back");
        assert!(presence.live(at(19)).is_empty());
    }
}
