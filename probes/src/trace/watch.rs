//! Tells a changed path from a hop that was silent for once.

use std::net::IpAddr;

/// So many traces in a row must show the same new path before it counts.
const CONFIRM: u32 = 2;

/// A path that is not what it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathChange {
    /// Hop by hop before; empty at the first path ever.
    pub before: Vec<Option<IpAddr>>,
    /// Hop by hop now.
    pub now: Vec<Option<IpAddr>>,
}

/// Watches the path to one target.
#[derive(Debug, Clone, Default)]
pub struct PathWatch {
    current: Option<Vec<Option<IpAddr>>>,
    candidate: Option<(Vec<Option<IpAddr>>, u32)>,
}

impl PathWatch {
    /// Takes the hops of a finished trace that reached its target. The first path is a change at once; later ones
    /// when seen twice. A silent hop matches any address and is filled in when it speaks.
    pub fn observe(&mut self, hops: Vec<Option<IpAddr>>) -> Option<PathChange> {
        let Some(current) = &mut self.current else {
            self.current = Some(hops.clone());
            return Some(PathChange { before: Vec::new(), now: hops });
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
        let before = std::mem::replace(current, now.clone());
        Some(PathChange { before, now })
    }

    /// The path in force; absent before the first trace.
    pub fn current(&self) -> Option<&[Option<IpAddr>]> {
        self.current.as_deref()
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
