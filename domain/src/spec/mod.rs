//! One text names a compressor with all that belongs to it: `topk(k=0.01)+ef(vanilla)+nesterov(mu=0.9)`.
//!
//! Parts in any order after the compressor, each at most once: `ef(MEMORY, ...)`, a momentum, `scope(bucket)` or
//! `scope(tensor)`, `values(bf16)` or `values(int8)` of what selects values, `checksum(crc32c)`, `nonfinite(skip)`, `seed(NUMBER)`. Written again, it comes out in one canonical form:
//! defaults left out, parts in that order. Messages that add up in flight have no checksum: asking for one is refused.
//! BytePS's string-to-string map is read by [`CompressorSpec::from_byteps`].
//!
//! A compressor whose first parameter must be given takes it without its key, too: `topk(0.01)`.
//!
//! How many values are kept is a share (`k=0.01`) or a number in digits alone (`k=1` is one value); `k=1.0` would be either, and
//! is refused.

mod byteps;
pub mod compressors;
mod error;
mod family;
mod kind;
mod nature;
mod params;
mod parse;
mod parts;
mod sizes;

pub use error::SpecError;
pub use family::{Family, default_compressors, further_compressors, is_name_alone};
pub use kind::CompressorKind;
pub use nature::{Nature, Typical, quantizer_bound};
pub use params::{Kind, MAX_PARAMETERS, MAX_VALUES, Param, Values};
use parse::WORD_PARTS;
pub use parse::split_list;
pub use parts::{MEMORIES, MOMENTA, MemoryKind, MomentumKind, Part};
pub use sizes::{EliasFano, IndexCoding, index_bytes, selection_bytes};

use crate::CompressionRatio;
use crate::words;
use std::cmp::Ordering;
use std::fmt;

/// GRACE's classes of compressors (Table 1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// Fewer bits per value.
    Quantization,
    /// Fewer values.
    Sparsification,
    /// Both.
    Hybrid,
    /// Factors of a matrix.
    LowRank,
}

/// How payloads of several ranks come together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Travels {
    /// Added up in flight by an allreduce: the payload is nothing but elements, and payloads add element by element.
    Sums(Element),
    /// Not in flight: every rank gets every rank's payload (an allgather, or a broadcast from each), and each aggregates.
    Gathers,
}

/// Type of the elements of a payload that adds up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Element {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of binary32.
    Bf16,
}

impl Element {
    /// Bytes of one.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

words! {
    /// What is compressed as one tensor.
    pub enum Scope {
        /// The fused gradient of all layers.
        Bucket = "bucket",
        /// Each layer by itself, with a state of its own.
        Tensor = "tensor",
    }
}

words! {
    /// How a selection's values travel.
    #[derive(Default)]
    pub enum ValueType {
        /// As they are.
        #[default]
        F32 = "f32",
        /// Rounded to bfloat16: 8 bits of precision.
        Bf16 = "bf16",
        /// Rounded to 127 steps to either side of 0, of the largest of each 256 values.
        Int8 = "int8",
    }
}

words! {
    /// Whether a message proves that it arrived as it was sent.
    #[derive(Default)]
    pub enum Checksum {
        /// No: the transport does.
        #[default]
        None = "none",
        /// CRC-32C over header and payload.
        Crc32c = "crc32c",
    }
}

words! {
    /// What to do about a gradient with NaN or infinity. No memory ever takes one in.
    #[derive(Default)]
    pub enum NonFinite {
        /// An error that names the place.
        #[default]
        Refuse = "refuse",
        /// The gradient counts as zeros, and a counter goes up.
        Skip = "skip",
    }
}

/// Lines of a table are equal, and ordered, by their names.
macro_rules! by_name {
    ($name:ident $(<$kind:ident>)?) => {
        impl$(<$kind>)? PartialEq for $name$(<$kind>)? {
            fn eq(&self, other: &Self) -> bool {
                self.name == other.name
            }
        }

        impl$(<$kind>)? Eq for $name$(<$kind>)? {}

        impl$(<$kind>)? PartialOrd for $name$(<$kind>)? {
            fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
                Some(self.cmp(other))
            }
        }

        impl$(<$kind>)? Ord for $name$(<$kind>)? {
            fn cmp(&self, other: &Self) -> Ordering {
                self.name.cmp(other.name)
            }
        }
    };
}

by_name!(CompressorInfo);
by_name!(Part<Kind>);

/// A compressor: its name and what it takes.
#[derive(Debug)]
pub struct CompressorInfo {
    /// In the textual form.
    pub name: &'static str,
    /// Its class.
    pub class: Class,
    /// One line for `--help`.
    pub about: &'static str,
    /// Paper, section, equation.
    pub source: &'static str,
    /// At most [`MAX_PARAMETERS`].
    pub params: &'static [Param],
    /// How payloads come together; by parameters, since some compressors do both.
    pub travels: fn(&Values) -> Travels,
    /// What it promises of what it sends; by parameters.
    pub nature: fn(&Values) -> Nature,
    /// Its gain on normally distributed values, by parameters; none where it is unbiased, where its bits tell it, or where it depends
    /// on the gradient's unit ([`CompressorSpec::typical_gain`]).
    pub typical_gain: fn(&Values, Typical) -> Option<f64>,
    /// What it takes as one tensor, if nothing else is asked for.
    pub scope: Scope,
    /// Whether the values decide how much is sent of a tensor, so that what is charged before they are known is a bound that they
    /// may stay far below; not where about k values are sent as they are, nor where coding alone saves a little.
    pub size_is_bound: bool,
    /// Its families that compete by default, `k` left open as `k=*`; none where it has to be asked for.
    pub candidates: &'static [&'static str],
    /// What trainers offer of it where it has to be asked for.
    pub on_request: OnRequest,
}

/// What trainers offer of a compressor that does not compete by default: a candidate where a job's policy or the controller's
/// settings name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnRequest {
    /// Its defaults, `k` left open, with error feedback unless it is unbiased.
    Usual,
    /// These families.
    As(&'static [&'static str]),
    /// Nothing, with the reason.
    No(&'static str),
}

impl CompressorInfo {
    /// Whether its messages are some of the tensor's values with their indices, which may then travel in fewer bits.
    pub fn copies_values(&self) -> bool {
        compressors::COPYING.contains(&self)
    }
}

/// A compressor with its parameters, memory, momentum and the rest.
///
/// Two are equal, and ordered, by what their texts say.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CompressorSpec {
    compressor: &'static CompressorInfo,
    values: Values,
    memory: Option<(&'static Part<MemoryKind>, Values)>,
    momentum: Option<(&'static Part<MomentumKind>, Values)>,
    scope: Scope,
    value_type: ValueType,
    checksum: Checksum,
    non_finite: NonFinite,
    seed: Option<u64>,
}

impl CompressorSpec {
    /// Nothing is compressed.
    pub const NONE: Self = Self::of(&compressors::NONE, Values::EMPTY);

    /// A compressor alone, from numbers as a message's header has them.
    pub fn from_numbers(compressor: &'static CompressorInfo, numbers: &[f64]) -> Option<Self> {
        Some(Self::of(compressor, Values::from_numbers(compressor.params, numbers)?))
    }

    const fn of(compressor: &'static CompressorInfo, values: Values) -> Self {
        let (memory, momentum) = (None, None);
        let (scope, value_type) = (compressor.scope, ValueType::F32);
        let (checksum, non_finite) = (Checksum::None, NonFinite::Refuse);
        Self { compressor, values, memory, momentum, scope, value_type, checksum, non_finite, seed: None }
    }

    /// Which compressor.
    pub fn compressor(&self) -> &'static CompressorInfo {
        self.compressor
    }

    /// The compressor's parameters.
    pub fn values(&self) -> &Values {
        &self.values
    }

    /// The memory of error feedback, with its parameters.
    pub fn memory(&self) -> Option<(MemoryKind, Values)> {
        self.memory.map(|(memory, values)| (memory.kind, values))
    }

    /// The momentum before it, with its parameters.
    pub fn momentum(&self) -> Option<(MomentumKind, Values)> {
        self.momentum.map(|(momentum, values)| (momentum.kind, values))
    }

    /// How its payloads come together.
    pub fn travels(&self) -> Travels {
        (self.compressor.travels)(&self.values)
    }

    /// What is compressed as one tensor.
    pub fn scope(&self) -> Scope {
        self.scope
    }

    /// How the values that it selects travel.
    pub fn value_type(&self) -> ValueType {
        self.value_type
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

    /// Where k is among the compressor's parameters.
    fn place_of_k(&self) -> Option<usize> {
        self.compressor.params.iter().position(Param::is_kept_share)
    }

    /// The share of values that is kept; none where the compressor keeps all, or a number of them.
    pub fn ratio(&self) -> Option<CompressionRatio> {
        CompressionRatio::new(self.values.number(self.place_of_k()?)).ok().filter(|ratio| !ratio.is_dense())
    }

    /// Columns of the factors that a matrix is sent as; none where it is not.
    pub fn rank(&self) -> Option<u64> {
        let place = self.compressor.params.iter().position(|param| param.name == "rank")?;
        Some(self.values.number(place) as u64)
    }

    /// The same with another k; unchanged where no share is kept.
    fn with_k(mut self, k: f64) -> Self {
        if let (Some(place), Some(_)) = (self.place_of_k(), self.ratio()) {
            self.values.set(place, k);
        }
        self
    }

    /// The same without memory and momentum.
    pub fn without_memory(self) -> Self {
        Self { memory: None, momentum: None, ..self }
    }

    /// Whether it picks k values and sends them, as they are, with their indices: what AR-Topk exchanges.
    pub fn selects(&self) -> bool {
        self.compressor.copies_values() && self.place_of_k().is_some() && self.value_type == ValueType::F32
    }

    /// k where it is a number of values above n: all n are kept then.
    pub fn k_above(&self, n: usize) -> Option<u64> {
        let k = self.values.number(self.place_of_k()?);
        (k > n as f64).then_some(k as u64)
    }

    /// Whether a codec of one can go on under the other.
    pub fn same_codec(&self, other: &Self) -> bool {
        let parts = |spec: &Self| (spec.compressor, spec.values, spec.scope, spec.value_type);
        parts(self) == parts(other)
    }

    /// Whether the memory stays.
    pub fn same_memory(&self, other: &Self) -> bool {
        self.memory == other.memory
    }
}

impl fmt::Debug for CompressorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for CompressorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_part(f, self.compressor.name, self.compressor.params, &self.values)?;
        if let Some((memory, values)) = &self.memory {
            write!(f, "+ef({}", memory.name)?;
            values.write(memory.params, false, f)?;
            f.write_str(")")?;
        }
        if let Some((momentum, values)) = &self.momentum {
            f.write_str("+")?;
            write_part(f, momentum.name, momentum.params, values)?;
        }
        let usual = Self::of(self.compressor, self.values);
        for part in WORD_PARTS {
            let word = (part.get)(self);
            if word != (part.get)(&usual) {
                write!(f, "+{}({word})", part.name)?;
            }
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

/// What a compressor is called in GRACE's release, in its paper or in general, and its name here.
const ALIASES: &[(&str, &str)] = &[
    ("dense", "none"),
    ("adaq", "adaptivethreshold"),
    ("u8bit", "eightbit"),
    ("8bit", "eightbit"),
    ("3lc", "threelc"),
    ("sketch", "sketchml"),
];

/// The compressor of a name or an alias.
fn find(name: &str) -> Result<&'static CompressorInfo, SpecError> {
    let all = || compressors::COMPRESSORS.iter().copied();
    let name = ALIASES.iter().find(|(theirs, _)| *theirs == name).map_or(name, |(_, ours)| *ours);
    let names = || all().map(|compressor| compressor.name).collect::<Vec<_>>();
    let unknown = || SpecError::unknown_compressor(name, &names(), parse::part_names());
    all().find(|compressor| compressor.name == name).ok_or_else(unknown)
}
