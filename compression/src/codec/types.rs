//! Small words of the interface.

pub use flexcomm_domain::spec::{Element, Scope, Travels};

/// A tensor as a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Values per column: m.
    pub rows: usize,
    /// Values per row: L. 1 for vectors.
    pub cols: usize,
}

impl Shape {
    /// A vector.
    pub const fn vector(n: usize) -> Self {
        Self { rows: n, cols: 1 }
    }

    /// n.
    pub const fn values(self) -> usize {
        self.rows * self.cols
    }

    /// Whether there is more than one row and column.
    pub const fn is_matrix(self) -> bool {
        self.rows > 1 && self.cols > 1
    }
}

/// Bytes of a payload, known before the values are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Size {
    /// The same whatever the values are.
    Exact(usize),
    /// Depends on the values; never more.
    AtMost(usize),
}

impl Size {
    /// The number of bytes, exact or at most.
    pub const fn most(self) -> usize {
        match self {
            Self::Exact(bytes) | Self::AtMost(bytes) => bytes,
        }
    }

    /// Of two payloads one after the other.
    pub const fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Exact(a), Self::Exact(b)) => Self::Exact(a + b),
            _ => Self::AtMost(self.most() + other.most()),
        }
    }

    /// Whether `bytes` is what it says.
    pub const fn admits(self, bytes: usize) -> bool {
        match self {
            Self::Exact(n) => bytes == n,
            Self::AtMost(n) => bytes <= n,
        }
    }
}

/// Where a decoded tensor goes.
#[derive(Debug)]
pub struct Target<'a> {
    /// What C(x) is multiplied with.
    pub scale: f32,
    /// One value per value of the tensor.
    pub out: &'a mut [f32],
    /// Whether what `out` holds counts as zeros.
    pub fresh: bool,
}

impl<'a> Target<'a> {
    /// `out += scale * C(x)`.
    pub fn add(scale: f32, out: &'a mut [f32]) -> Self {
        Self { scale, out, fresh: false }
    }

    /// `out = scale * C(x)`.
    pub fn replace(scale: f32, out: &'a mut [f32]) -> Self {
        Self { scale, out, fresh: true }
    }

    /// Scale and values to add to, for what does no more than add.
    pub(crate) fn added(self) -> (f32, &'a mut [f32]) {
        if self.fresh {
            self.out.fill(0.0);
        }
        (self.scale, self.out)
    }
}

/// How much of a memory's residual is in the compensated gradient.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Carried {
    /// x = `weight` * residual + what this step added.
    pub weight: f32,
    /// Where nothing is sent, `kept` * residual + what this step added is the next residual.
    pub kept: f32,
}

impl Carried {
    /// As it is.
    pub const WHOLE: Self = Self { weight: 1.0, kept: 1.0 };

    /// Times `weight`.
    pub const fn scaled(weight: f32) -> Self {
        Self { weight, kept: weight }
    }
}

/// What one read of a tensor tells.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Stats {
    /// ‖x‖². In f64, in which no sum of 2^32 squares of f32 overflows.
    pub energy: f64,
    /// max |x|.
    pub max: f32,
}

impl Stats {
    /// Whether every value is.
    pub fn is_finite(self) -> bool {
        self.energy.is_finite() && self.max.is_finite()
    }

    /// ‖x‖₂.
    pub fn norm(self) -> f64 {
        self.energy.sqrt()
    }
}
