//! Links and the matrix of links between the ranks of a job.

use crate::{Bandwidth, Invalid, Seconds};
use serde::{Deserialize, Serialize};

/// One directed link in the Hockney model: `t(m) = alpha + m * beta`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// alpha: one-way latency in seconds.
    pub alpha: Seconds,
    /// 8 / beta: bandwidth in bit/s.
    pub bandwidth: Bandwidth,
}

impl Link {
    /// From alpha in seconds and bandwidth in bit/s.
    pub fn new(alpha_s: f64, bandwidth_bps: f64) -> Result<Self, Invalid> {
        Ok(Self { alpha: Seconds::new(alpha_s)?, bandwidth: Bandwidth::new(bandwidth_bps)? })
    }

    /// Time in seconds for a message of `bytes`.
    pub fn time(&self, bytes: f64) -> f64 {
        self.alpha.get() + bytes * self.bandwidth.beta()
    }
}

/// Directed links between the N ranks of a job, the diagonal is unused, and which of the ranks share a NIC.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Stored")]
pub struct LinkMatrix {
    n: usize,
    links: Vec<Link>,
    /// The node of each rank. Empty: each has its own.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    nodes: Vec<u32>,
}

/// A matrix as it was stored.
#[derive(Deserialize)]
struct Stored {
    n: usize,
    links: Vec<Link>,
    #[serde(default)]
    nodes: Vec<u32>,
}

impl TryFrom<Stored> for LinkMatrix {
    type Error = Invalid;

    fn try_from(Stored { n, links, nodes }: Stored) -> Result<Self, Invalid> {
        let (found, wanted) = (links.len(), ranks(n)?.pow(2));
        if found != wanted {
            let allowed = format!("{wanted} between {n} ranks");
            return Err(Invalid::Range { what: "number of links", value: found as f64, allowed });
        }
        let matrix = Self { n, links, nodes: Vec::new() };
        if nodes.is_empty() { Ok(matrix) } else { matrix.on_nodes(nodes) }
    }
}

/// Most ranks a matrix may span: N² links are stored.
pub(crate) const MAX_RANKS: usize = 4096;

impl LinkMatrix {
    /// All links alike. `n` from 1 to 4096.
    pub fn uniform(n: usize, link: Link) -> Result<Self, Invalid> {
        Self::from_fn(n, |_, _| link)
    }

    /// Builds from a function of (from, to), each rank on a node of its own.
    pub fn from_fn(n: usize, mut link: impl FnMut(usize, usize) -> Link) -> Result<Self, Invalid> {
        let links = (0..ranks(n)?.pow(2)).map(|i| link(i / n, i % n)).collect();
        Ok(Self { n, links, nodes: Vec::new() })
    }

    /// The same links between ranks of which some are on one node: rank r is on node `nodes[r]`, from 0 to N-1. What ranks of one
    /// node send to other nodes goes through its NIC, which carries it one after the other, and so does what they receive.
    pub fn on_nodes(self, nodes: Vec<u32>) -> Result<Self, Invalid> {
        if nodes.len() != self.n {
            let allowed = format!("{}, one for each rank", self.n);
            return Err(Invalid::Range { what: "number of ranks' nodes", value: nodes.len() as f64, allowed });
        }
        match nodes.iter().find(|node| **node as usize >= self.n) {
            Some(node) => {
                let allowed = format!("0 to {}", self.n - 1);
                Err(Invalid::Range { what: "node of a rank", value: f64::from(*node), allowed })
            }
            None => Ok(Self { nodes, ..self }),
        }
    }

    /// With links between ranks of one node, which nothing measures, as shared memory or loopback are: 20 us and 20 Gbit/s, or the shortest latency
    /// and the largest bandwidth between nodes, so that they never are the slowest.
    #[must_use]
    pub fn with_local_links(self) -> Self {
        let has_several = self.has_several();
        let fastest = |(alpha, bandwidth): (f64, f64), link: Link| {
            (link.alpha.get().min(alpha), link.bandwidth.get().max(bandwidth))
        };
        let (alpha, bandwidth) = self.between().filter(|_| has_several).fold((20e-6, 20e9), fastest);
        let Ok(local) = Link::new(alpha, bandwidth) else { return self };
        let nodes: Vec<usize> = (0..self.n).map(|rank| self.node(rank)).collect();
        self.with(|from, to, link| if nodes[from] == nodes[to] { local } else { link })
    }

    /// Whether its ranks are on more than one node.
    fn has_several(&self) -> bool {
        (1..self.n).any(|rank| self.node(rank) != self.node(0))
    }

    /// Other links between the same ranks on the same nodes: of (from, to) and the link that is there.
    #[must_use]
    pub fn with(mut self, mut link: impl FnMut(usize, usize, Link) -> Link) -> Self {
        let n = self.n;
        self.links.iter_mut().enumerate().for_each(|(i, is)| *is = link(i / n, i % n, *is));
        self
    }

    /// N.
    pub fn ranks(&self) -> usize {
        self.n
    }

    /// The link from one rank to another. Panics when a rank is not below N, as slices do.
    pub fn get(&self, from: usize, to: usize) -> Link {
        assert!(from < self.n && to < self.n, "rank out of range");
        self.links[from * self.n + to]
    }

    /// The node of a rank, from 0 to N-1. Panics when the rank is not below N.
    pub fn node(&self, rank: usize) -> usize {
        assert!(rank < self.n, "rank out of range");
        self.nodes.get(rank).map_or(rank, |node| *node as usize)
    }

    /// Whether ranks share a NIC.
    pub fn is_shared(&self) -> bool {
        let mut seen = vec![false; self.nodes.len()];
        self.nodes.iter().any(|node| std::mem::replace(&mut seen[*node as usize], true))
    }

    /// The links between ranks of different nodes, row by row. Where all are on one node, those between different ranks; with one rank, the
    /// diagonal's link.
    pub fn between(&self) -> impl Iterator<Item = Link> {
        let (n, has_several) = (self.n, self.has_several());
        let counts = move |from: usize, to: usize| match has_several {
            true => self.node(from) != self.node(to),
            false => n == 1 || from != to,
        };
        self.links.iter().enumerate().filter(move |(i, _)| counts(i / n, i % n)).map(|(_, link)| *link)
    }

    /// The slowest alpha and the slowest bandwidth of [`Self::between`]: what a schedule that uses every link pays.
    pub fn worst(&self) -> Link {
        self.between()
            .reduce(|a, b| Link {
                alpha: if a.alpha >= b.alpha { a.alpha } else { b.alpha },
                bandwidth: if a.bandwidth <= b.bandwidth { a.bandwidth } else { b.bandwidth },
            })
            .unwrap_or(self.links[0])
    }
}

fn ranks(n: usize) -> Result<usize, Invalid> {
    match n {
        1..=MAX_RANKS => Ok(n),
        _ => Err(Invalid::Range { what: "number of ranks", value: n as f64, allowed: "1 to 4096".into() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worst_takes_each_maximum() {
        let matrix = LinkMatrix::from_fn(3, |from, to| match (from, to) {
            (0, 1) => Link::new(0.05, 1e10).unwrap(),
            (1, 2) => Link::new(0.001, 1e6).unwrap(),
            _ => Link::new(0.001, 1e9).unwrap(),
        })
        .unwrap();
        assert_eq!(matrix.worst(), Link::new(0.05, 1e6).unwrap());
    }

    #[test]
    fn sizes_are_bounded() {
        let link = Link::new(0.001, 1e9).unwrap();
        assert!(LinkMatrix::uniform(0, link).is_err());
        assert!(LinkMatrix::uniform(4097, link).is_err());
    }

    #[test]
    fn nodes_are_checked_and_stored() {
        let matrix = LinkMatrix::uniform(4, Link::new(0.001, 1e9).unwrap()).unwrap();
        let bare = serde_json::to_string(&matrix).unwrap();
        assert!(!bare.contains("nodes") && !matrix.is_shared(), "{bare}");
        let on = |nodes: &[u32]| matrix.clone().on_nodes(nodes.to_vec());
        assert!(on(&[0, 0, 1]).is_err() && on(&[0, 0, 1, 4]).is_err());
        assert!(!on(&[3, 2, 1, 0]).unwrap().is_shared());
        let shared = on(&[0, 0, 1, 1]).unwrap();
        assert!(shared.is_shared() && shared.node(1) == 0 && matrix.node(1) == 1);
        let local = |nodes: &[u32], from, to| on(nodes).unwrap().with_local_links().get(from, to);
        assert_eq!(local(&[0, 0, 1, 1], 0, 1), Link::new(20e-6, 20e9).unwrap());
        assert_eq!(local(&[0, 0, 1, 1], 1, 2), Link::new(0.001, 1e9).unwrap());
        assert_eq!(local(&[0, 0, 0, 0], 1, 2), Link::new(20e-6, 20e9).unwrap());
        let count = |nodes: &[u32]| on(nodes).unwrap().between().count();
        assert_eq!([&[0, 0, 1, 1], &[2, 2, 2, 2], &[0, 1, 2, 3]].map(|nodes| count(nodes)), [8, 12, 12]);
        let text = serde_json::to_string(&shared).unwrap();
        assert_eq!(serde_json::from_str::<LinkMatrix>(&text).unwrap(), shared);
        for (n, says) in [("3", "number of links is 16, allowed is 9 between 3 ranks"), ("0", "number of ranks")] {
            let error =
                serde_json::from_str::<LinkMatrix>(&text.replacen("\"n\":4", &format!("\"n\":{n}"), 1)).unwrap_err();
            assert!(error.to_string().contains(says), "{error}");
        }
    }
}
