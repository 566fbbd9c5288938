//! Links and the matrix of links between the ranks of a job.

use crate::{Bandwidth, Invalid, Seconds};
use serde::{Deserialize, Serialize};

/// Seconds in which an agent's confidence in a bandwidth that is not measured again falls to 1/e.
pub const BANDWIDTH_CONFIDENCE_AGE_S: f64 = 120.0;

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

/// Directed links between the N ranks of a job; the diagonal is unused.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LinkMatrix {
    n: usize,
    links: Vec<Link>,
}

/// Most ranks a matrix may span: N² links are stored.
pub(crate) const MAX_RANKS: usize = 4096;

impl LinkMatrix {
    /// All links alike. `n` from 1 to 4096.
    pub fn uniform(n: usize, link: Link) -> Result<Self, Invalid> {
        Self::from_fn(n, |_, _| link)
    }

    /// Builds from a function of (from, to).
    pub fn from_fn(n: usize, mut link: impl FnMut(usize, usize) -> Link) -> Result<Self, Invalid> {
        if n == 0 || n > MAX_RANKS {
            return Err(Invalid::Range { what: "number of ranks", value: n as f64, allowed: "1 to 4096".into() });
        }
        let links = (0..n * n).map(|i| link(i / n, i % n)).collect();
        Ok(Self { n, links })
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

    /// The links between different ranks, row by row. With one rank, the diagonal's link.
    pub fn between(&self) -> impl Iterator<Item = Link> {
        let off_diagonal = self.links.iter().enumerate().filter(|(i, _)| self.n == 1 || i / self.n != i % self.n);
        off_diagonal.map(|(_, link)| *link)
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
}
