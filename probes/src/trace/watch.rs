//! Tells a changed path from a hop that was silent for once.

use std::net::IpAddr;

/// So many traces in a row must show the same new path before it counts.
const CONFIRM: u32 = 2;

/// Watches the path to one target.
#[derive(Debug, Clone, Default)]
pub struct PathWatch {
    current: Option<Vec<Option<IpAddr>>>,
    candidate: Option<(Vec<Option<IpAddr>>, u32)>,
}

impl PathWatch {
    /// Takes the hops of a finished trace that reached its target; returns them when the path has changed. The first path is a
    /// change at once; later ones when seen twice. A silent hop matches any address and is filled in when it answers.
    pub fn observe(&mut self, hops: Vec<Option<IpAddr>>) -> Option<Vec<Option<IpAddr>>> {
        let Some(current) = &mut self.current else {
            self.current = Some(hops.clone());
            return Some(hops);
        };
        if same(current, &hops) {
            fill(current, &hops);
            self.candidate = None;
            return None;
        }
        let seen = match &mut self.candidate {
            Some((candidate, seen)) if same(candidate, &hops) => {
                fill(candidate, &hops);
                *seen += 1;
                *seen
            }
            other => {
                *other = Some((hops, 1));
                1
            }
        };
        if seen < CONFIRM {
            return None;
        }
        let (now, _) = self.candidate.take()?;
        current.clone_from(&now);
        Some(now)
    }
}

fn same(a: &[Option<IpAddr>], b: &[Option<IpAddr>]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(x, y)| x.is_none() || y.is_none() || x == y)
}

fn fill(known: &mut [Option<IpAddr>], seen: &[Option<IpAddr>]) {
    for (slot, addr) in known.iter_mut().zip(seen) {
        *slot = slot.or(*addr);
    }
}
