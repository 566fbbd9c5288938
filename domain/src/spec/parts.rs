//! What stands beside a compressor, with parameters of its own: memories of error feedback, momenta.

use super::params::{FACTOR, NOT_NEGATIVE, POSITIVE, Param};

/// Which memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// GRACE's equation 5, with BytePS's rescaling.
    Vanilla,
    /// EFsignSGD's.
    EfSign,
    /// Deep gradient compression's.
    Dgc,
    /// Sparse gradient compression's.
    Sgc,
}

/// Which momentum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MomentumKind {
    /// BytePS's.
    Nesterov,
}

/// A memory, in `ef(NAME, ...)`, or a momentum, in `NAME(...)`.
#[derive(Debug)]
pub struct Part<Kind> {
    /// Which.
    pub kind: Kind,
    /// Its name.
    pub name: &'static str,
    /// One line for `--help`.
    pub about: &'static str,
    /// What it takes.
    pub params: &'static [Param],
}

/// Every memory.
pub static MEMORIES: &[Part<MemoryKind>] = &[
    Part {
        kind: MemoryKind::Vanilla,
        name: "vanilla",
        about: "adds the residual, rescaled when the learning rate changes",
        params: &[
            Param::optional("beta", POSITIVE, 1.0, "decay of the residual"),
            Param::optional("gamma", POSITIVE, 1.0, "weight of the gradient"),
        ],
    },
    Part {
        kind: MemoryKind::EfSign,
        name: "efsign",
        about: "EFsignSGD: compresses e + gamma g, in units of the model's update",
        params: &[Param::optional("gamma", NOT_NEGATIVE, 0.0, "weight of the gradient; 0: each step's learning rate")],
    },
    Part {
        kind: MemoryKind::Dgc,
        name: "dgc",
        about: "DGC: momentum before accumulation, both masked where values were sent",
        params: &[Param::required("mu", FACTOR, "decay of the momentum")],
    },
    Part {
        kind: MemoryKind::Sgc,
        name: "sgc",
        about: "SGC: accumulates, and compresses the sum with alpha times itself before",
        params: &[
            Param::required("alpha", FACTOR, "weight of the residual"),
            Param::optional("epsilon", POSITIVE, 1.0, "weight of the gradient"),
        ],
    },
];

/// Every momentum.
pub static MOMENTA: &[Part<MomentumKind>] = &[Part {
    kind: MomentumKind::Nesterov,
    name: "nesterov",
    about: "m = mu m + g; compresses g + mu m",
    params: &[Param::required("mu", FACTOR, "decay of the momentum")],
}];
