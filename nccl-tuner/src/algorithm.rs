//! NCCL's names for what can be preferred. The numbers are those of its header `nccl_tuner.h`, the same since 2.4.

/// The shape of an allreduce between nodes, as a decision names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// NCCL's double binary tree; where NVLink SHARP does the part within a node, its NVLS tree.
    Tree,
    /// NCCL's ring.
    Ring,
}

/// `NCCL_ALGO_TREE`.
pub const TREE: usize = 0;
/// `NCCL_ALGO_RING`.
pub const RING: usize = 1;
/// `NCCL_ALGO_COLLNET_DIRECT`: reduction in the network.
pub const COLLNET_DIRECT: usize = 2;
/// `NCCL_ALGO_COLLNET_CHAIN`: reduction in the network.
pub const COLLNET_CHAIN: usize = 3;
/// `NCCL_ALGO_NVLS`: reduction in the NVLink switch of one node, or with the network's.
pub const NVLS: usize = 4;
/// `NCCL_ALGO_NVLS_TREE`: reduction in the NVLink switch of each node, a tree between nodes.
pub const NVLS_TREE: usize = 5;

/// `NCCL_PROTO_LL`.
pub const LL: usize = 0;
/// `NCCL_PROTO_SIMPLE`.
pub const SIMPLE: usize = 2;

/// `ncclFuncAllReduce`.
pub const ALL_REDUCE: i32 = 4;

impl Algorithm {
    /// From NCCL's number.
    pub fn from_number(number: i32) -> Option<Self> {
        match usize::try_from(number).ok()? {
            TREE => Some(Self::Tree),
            RING => Some(Self::Ring),
            _ => None,
        }
    }

    /// NCCL's number.
    pub fn number(self) -> usize {
        match self {
            Self::Tree => TREE,
            Self::Ring => RING,
        }
    }

    /// The algorithms of NCCL that have this shape between nodes.
    pub fn rows(self) -> &'static [usize] {
        match self {
            Self::Tree => &[TREE, NVLS_TREE],
            Self::Ring => &[RING],
        }
    }
}

impl std::fmt::Display for Algorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Tree => "tree",
            Self::Ring => "ring",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_go_both_ways_and_nothing_else_is_known() {
        for algorithm in [Algorithm::Tree, Algorithm::Ring] {
            assert_eq!(Algorithm::from_number(algorithm.number() as i32), Some(algorithm));
        }
        for number in [-1, 2, 6, i32::MAX, i32::MIN] {
            assert_eq!(Algorithm::from_number(number), None);
        }
    }
}
