//! One text names a whole strategy: `topk(k=0.01)+ef(vanilla)+nesterov(mu=0.9)`.
//!
//! Parts in any order after the compressor, each at most once: `ef(MEMORY, ...)`, a momentum, `scope(bucket)` or
//! `scope(tensor)`, `checksum(crc32c)`, `nonfinite(skip)`, `seed(NUMBER)`. Written again, it comes out in one canonical form: defaults
//! left out, parts in that order. Messages that add up in flight have no checksum: asking for one is refused. BytePS's string-to-string map is read by [`Strategy::from_byteps`].
//!
//! How many values are kept is a share (`k=0.01`) or a number in digits alone (`k=1` is one value); `k=1.0` would be either, and
//! is refused.

mod byteps;
mod entry;
mod error;
pub mod params;
mod parse;

pub use entry::{Class, Entry, MemoryEntry, MomentumEntry, Nature};
pub use error::StrategyError;
pub use params::{Kind, Param, Values};

use crate::codec::{Codec, Scope, Shape, Travels};
use crate::format::Checksum;
use crate::{memory, methods, momentum};
use std::fmt;

/// What to do about a gradient with NaN or infinity. No memory ever takes one in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum NonFinite {
    /// An error that names the place.
    #[default]
    Refuse,
    /// The gradient counts as zeros, and the pipeline's counter goes up.
    Skip,
}

/// A compressor with its parameters, memory, momentum and the rest.
#[derive(Debug, Clone, Copy)]
pub struct Strategy {
    entry: &'static Entry,
    values: Values,
    memory: Option<(&'static MemoryEntry, Values)>,
    momentum: Option<(&'static MomentumEntry, Values)>,
    scope: Scope,
    checksum: Checksum,
    non_finite: NonFinite,
    seed: Option<u64>,
}

impl Strategy {
    /// A compressor alone, from numbers as a message's header has them.
    pub fn from_numbers(entry: &'static Entry, numbers: &[f64]) -> Option<Self> {
        Some(Self::of(entry, Values::from_numbers(entry.params, numbers)?))
    }

    fn of(entry: &'static Entry, values: Values) -> Self {
        let (memory, momentum) = (None, None);
        let (checksum, non_finite) = (Checksum::None, NonFinite::Refuse);
        Self { entry, values, memory, momentum, scope: entry.scope, checksum, non_finite, seed: None }
    }

    /// The compressor's line in the registry.
    pub fn entry(&self) -> &'static Entry {
        self.entry
    }

    /// The compressor's parameters.
    pub fn values(&self) -> &Values {
        &self.values
    }

    /// How its payloads come together.
    pub fn travels(&self) -> Travels {
        (self.entry.travels)(&self.values)
    }

    /// What the compressor promises.
    pub fn nature(&self) -> Nature {
        (self.entry.nature)(&self.values)
    }

    /// Itself, where a training by it moves; one that sends next to nothing for ever is refused.
    ///
    /// # Errors
    /// [`StrategyError::NoMemory`].
    pub fn trainable(self) -> Result<Self, StrategyError> {
        match (self.nature(), self.memory) {
            (Nature::Accumulated(_), None) => Err(StrategyError::NoMemory { of: self.to_string() }),
            _ => Ok(self),
        }
    }

    /// What is compressed as one tensor.
    pub fn scope(&self) -> Scope {
        self.scope
    }

    /// Whether messages carry a checksum.
    pub fn checksum(&self) -> Checksum {
        self.checksum
    }

    /// The seed that was asked for, in place of the job's.
    pub fn seed(&self) -> Option<u64> {
        self.seed
    }

    /// What happens to NaN and infinity.
    pub fn non_finite(&self) -> NonFinite {
        self.non_finite
    }

    /// k where it is a number of values above n: all n are kept then.
    pub fn k_above(&self, n: usize) -> Option<u64> {
        let params = self.entry.params.iter().zip(self.values.all());
        let k =
            params.filter(|(param, _)| param.name == "k" && matches!(param.kind, Kind::Kept)).map(|(_, k)| *k).next();
        k.filter(|k| *k > n as f64).map(|k| k as u64)
    }

    /// A codec for one tensor.
    pub fn codec(&self, shape: Shape) -> Box<dyn Codec> {
        (self.entry.build)(&self.values, shape)
    }

    /// A memory for n values.
    pub fn memory(&self, n: usize) -> Option<Box<dyn memory::Memory>> {
        self.memory.map(|(entry, values)| (entry.build)(&values, n))
    }

    /// A momentum for n values.
    pub fn momentum(&self, n: usize) -> Option<Box<dyn momentum::Momentum>> {
        self.momentum.map(|(entry, values)| (entry.build)(&values, n))
    }
}

impl Strategy {
    /// Whether codecs of one can go on under the other.
    pub(crate) fn same_codec(&self, other: &Self) -> bool {
        self.entry.code == other.entry.code && self.values == other.values && self.scope == other.scope
    }

    /// Whether the memory stays.
    pub(crate) fn same_memory(&self, other: &Self) -> bool {
        let name = |s: &Self| s.memory.map(|(entry, values)| (entry.name, values));
        name(self) == name(other)
    }

    /// Momenta of one kind go on one from the other.
    pub(crate) fn momentum_kind(&self) -> Option<&'static str> {
        self.momentum.map(|(entry, _)| entry.name)
    }
}

impl PartialEq for Strategy {
    /// The same text.
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_part(f, self.entry.name, self.entry.params, &self.values)?;
        if let Some((entry, values)) = &self.memory {
            write!(f, "+ef({}", entry.name)?;
            values.write(entry.params, false, f)?;
            f.write_str(")")?;
        }
        if let Some((entry, values)) = &self.momentum {
            f.write_str("+")?;
            write_part(f, entry.name, entry.params, values)?;
        }
        if self.scope != self.entry.scope {
            write!(f, "+scope({})", self.scope.name())?;
        }
        if self.checksum == Checksum::Crc32c {
            f.write_str("+checksum(crc32c)")?;
        }
        if self.non_finite == NonFinite::Skip {
            f.write_str("+nonfinite(skip)")?;
        }
        if let Some(seed) = self.seed {
            write!(f, "+seed({seed})")?;
        }
        Ok(())
    }
}

fn write_part(f: &mut fmt::Formatter<'_>, name: &str, params: &[Param], values: &Values) -> fmt::Result {
    f.write_str(name)?;
    if values.any_given(params) {
        f.write_str("(")?;
        values.write(params, true, f)?;
        f.write_str(")")?;
    }
    Ok(())
}

/// The compressor of a name.
pub fn find(name: &str) -> Result<&'static Entry, StrategyError> {
    let unknown = || StrategyError::unknown("compressor", name, methods::all().map(|entry| entry.name));
    methods::all().find(|entry| entry.name == name).ok_or_else(unknown)
}

/// The compressor of a code on the wire.
pub fn by_code(code: u8) -> Option<&'static Entry> {
    methods::all().find(|entry| entry.code == code)
}
