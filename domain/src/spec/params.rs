//! Parameters: their names, ranges and values.

use super::SpecError;
use crate::nearest;
use std::cmp::Ordering;
use std::fmt;
use std::ops::{Bound, RangeBounds};

/// Most parameters of one compressor, memory or momentum.
pub const MAX_PARAMETERS: usize = 12;
/// Most values of a gradient: indices are 32 bits wide.
pub const MAX_VALUES: usize = u32::MAX as usize;

/// One parameter of a compressor, a memory or a momentum.
#[derive(Debug, Clone, Copy)]
pub struct Param {
    /// As written before `=`.
    pub name: &'static str,
    /// One line for `--help`.
    pub about: &'static str,
    /// What it may be.
    pub kind: Kind,
    /// None: it must be given.
    pub default: Option<f64>,
}

impl Param {
    /// A parameter that must be given.
    pub const fn required(name: &'static str, kind: Kind, about: &'static str) -> Self {
        Self { name, about, kind, default: None }
    }

    /// A parameter with a default.
    pub const fn optional(name: &'static str, kind: Kind, default: f64, about: &'static str) -> Self {
        Self { name, about, kind, default: Some(default) }
    }

    /// Whether it is the k of which a share may be left open.
    pub(super) fn is_kept_share(&self) -> bool {
        self.name == "k" && matches!(self.kind, Kind::Kept)
    }
}

/// What a value may be. All are held as f64: a choice by its place, a switch as 0 or 1.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// How many values are kept: a share above 0 and below 1, or a number of them from 1 on, where a number above n keeps all
    /// n (one strategy serves buckets of any length). A number is written in digits alone: `1` is one value, while `1.0` could
    /// as well be the share that is all of them, and is refused. See [`kept`].
    Kept,
    /// Any number in a range.
    Number(Bound<f64>, Bound<f64>),
    /// A whole number from .. to, both included.
    Whole(u64, u64),
    /// One of these words.
    Choice(&'static [&'static str]),
    /// true or false.
    Switch,
}

/// Above 0.
pub const POSITIVE: Kind = Kind::Number(Bound::Excluded(0.0), Bound::Unbounded);

/// Above 0 and below 1.
pub const INSIDE_UNIT: Kind = Kind::Number(Bound::Excluded(0.0), Bound::Excluded(1.0));

/// Above 0, up to 1.
pub const SHARE: Kind = Kind::Number(Bound::Excluded(0.0), Bound::Included(1.0));

/// From 0.
pub const NOT_NEGATIVE: Kind = Kind::Number(Bound::Included(0.0), Bound::Unbounded);

/// Any number.
pub const ANY_NUMBER: Kind = Kind::Number(Bound::Unbounded, Bound::Unbounded);

/// From 0, below 1.
pub const FACTOR: Kind = Kind::Number(Bound::Included(0.0), Bound::Excluded(1.0));

/// k of n values for a [`Kind::Kept`]: round(share * n) but at least 1, or the whole number but at most n.
pub fn kept(value: f64, n: usize) -> usize {
    let wanted = if value < 1.0 { (value * n as f64).round() } else { value };
    (wanted as usize).clamp(1, n.max(1)).min(n)
}

impl Kind {
    /// Reads a value as written.
    pub(super) fn read(self, text: &str) -> Option<f64> {
        let value = match self {
            Self::Choice(words) => return words.iter().position(|word| *word == text).map(|at| at as f64),
            Self::Switch => return ["false", "true"].iter().position(|word| *word == text).map(|at| at as f64),
            _ => text.parse::<f64>().ok()?,
        };
        let counted = text.bytes().all(|c| c.is_ascii_digit());
        let clear = counted || value < 1.0 || !matches!(self, Self::Kept);
        (clear && self.admits(value)).then_some(value)
    }

    /// Whether a number is in range (numbers also come from headers).
    pub fn admits(self, value: f64) -> bool {
        let whole = value.fract() == 0.0;
        match self {
            Self::Kept => value > 0.0 && (value < 1.0 || whole && value <= MAX_VALUES as f64),
            Self::Number(low, high) => (low, high).contains(&value) && fits_single((low, high), value),
            Self::Whole(low, high) => whole && (low as f64..=high as f64).contains(&value),
            Self::Choice(words) => whole && value >= 0.0 && value < words.len() as f64,
            Self::Switch => value == 0.0 || value == 1.0,
        }
    }

    /// The allowed range in words, for a value as written that is refused: also where only f32's precision puts it outside.
    pub(super) fn allowed(self, text: &str) -> String {
        if let Self::Choice(words) = self
            && let Some(nearest) = nearest(&text.to_lowercase(), words)
        {
            return format!("{self}; did you mean {nearest}?");
        }
        let single = match (self, text.parse::<f64>()) {
            (Self::Number(low, high), Ok(value)) => value.is_finite() && (low, high).contains(&value),
            _ => false,
        };
        format!("{self}{}", if single { ", and so as a 32-bit float, which the method reckons in" } else { "" })
    }

    fn write(self, value: f64, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Choice(words) => f.write_str(words.get(value as usize).copied().unwrap_or_default()),
            Self::Switch => write!(f, "{}", value == 1.0),
            Self::Kept if value == ANY_SHARE => f.write_str(ANY),
            // Digits alone would be hundreds of them.
            Self::Kept | Self::Number(..) if value != 0.0 && !PLAIN.contains(&value.abs()) => write!(f, "{value:e}"),
            _ => write!(f, "{value}"),
        }
    }
}

/// Magnitudes that are written without an exponent.
const PLAIN: std::ops::Range<f64> = 1e-9..1e16;

/// Whether a number is in range as f32 too, in which methods reckon: finite, no 0 that was none, and on the same side of the
/// ends (0.99999999999 would be 1).
fn fits_single(range: (Bound<f64>, Bound<f64>), value: f64) -> bool {
    let single = |bound: Bound<f64>| bound.map(|end| end as f32);
    let as_single = value as f32;
    let inside = (single(range.0), single(range.1)).contains(&as_single);
    as_single.is_finite() && inside && (as_single == 0.0) == (value == 0.0)
}

impl fmt::Display for Kind {
    /// The allowed range in words.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kept => f.write_str(
                "a share above 0 and below 1, or a whole number of values from 1 to 2^32 - 1 in digits alone (1.0 would be either)",
            ),
            Self::Number(low, high) => {
                f.write_str("a number")?;
                match low {
                    Bound::Included(low) => write!(f, " from {low}")?,
                    Bound::Excluded(low) => write!(f, " above {low}")?,
                    Bound::Unbounded => {}
                }
                match high {
                    Bound::Included(high) => write!(f, " to {high}"),
                    Bound::Excluded(high) => write!(f, " below {high}"),
                    Bound::Unbounded => Ok(()),
                }
            }
            Self::Whole(low, high) => write!(f, "a whole number from {low} to {high}"),
            Self::Choice(words) => f.write_str(&words.join(" or ")),
            Self::Switch => f.write_str("true or false"),
        }
    }
}

/// Values of all parameters, in the order of their table.
#[derive(Debug, Clone, Copy)]
pub struct Values {
    values: [f64; MAX_PARAMETERS],
    count: usize,
}

impl PartialEq for Values {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Values {}

impl PartialOrd for Values {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Values {
    fn cmp(&self, other: &Self) -> Ordering {
        let pairs = self.all().iter().zip(other.all());
        let first = pairs.map(|(a, b)| a.total_cmp(b)).find(|order| order.is_ne());
        first.unwrap_or_else(|| self.count.cmp(&other.count))
    }
}

/// k of a compressor whose share is left open, see [`super::Family`]; no text but a family's has it.
pub(super) const ANY_SHARE: f64 = 0.0;
/// How it is written.
pub(super) const ANY: &str = "*";

impl Values {
    /// Of what takes no parameters.
    pub(super) const EMPTY: Self = Self { values: [0.0; MAX_PARAMETERS], count: 0 };

    pub(super) fn set(&mut self, place: usize, value: f64) {
        self.values[place] = value;
    }

    /// From `key=value` pairs; what is not given takes its default.
    pub(super) fn read(of: &str, params: &[Param], given: &[(&str, &str)]) -> Result<Self, SpecError> {
        let mut out = Self { values: [0.0; MAX_PARAMETERS], count: params.len() };
        for (i, (key, _)) in given.iter().enumerate() {
            if !params.iter().any(|p| p.name == *key) {
                return Err(SpecError::unknown_key(of, key, params));
            }
            if given[..i].iter().any(|(before, _)| before == key) {
                return Err(SpecError::Twice { of: of.into(), key: (*key).into() });
            }
        }
        for (value, param) in out.values.iter_mut().zip(params) {
            *value = match given.iter().find(|(key, _)| *key == param.name) {
                Some((_, text)) => param.kind.read(text).ok_or_else(|| SpecError::range(of, param, text))?,
                None => param.default.ok_or_else(|| SpecError::missing(of, param))?,
            };
        }
        Ok(out)
    }

    /// From numbers, as a header has them; None when one is out of range or their count is another.
    pub fn from_numbers(params: &[Param], numbers: &[f64]) -> Option<Self> {
        let mut out = Self { values: [0.0; MAX_PARAMETERS], count: params.len() };
        let fits = numbers.len() == params.len() && params.iter().zip(numbers).all(|(p, v)| p.kind.admits(*v));
        if !fits {
            return None;
        }
        out.values[..numbers.len()].copy_from_slice(numbers);
        Some(out)
    }

    /// The number in a place of the table; 0 beyond its end.
    pub fn number(&self, place: usize) -> f64 {
        self.all().get(place).copied().unwrap_or(0.0)
    }

    /// As [`Self::number`], for whole numbers and choices.
    pub fn whole(&self, place: usize) -> usize {
        self.number(place) as usize
    }

    /// As [`Self::number`], for switches.
    pub fn is_on(&self, place: usize) -> bool {
        self.number(place) == 1.0
    }

    /// k of n, for [`Kind::Kept`].
    pub fn kept(&self, place: usize, n: usize) -> usize {
        kept(self.number(place), n)
    }

    /// All of them.
    pub fn all(&self) -> &[f64] {
        &self.values[..self.count]
    }

    /// `key=value` for all that differ from their default.
    pub(super) fn write(&self, params: &[Param], first: bool, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut first = first;
        for (param, value) in params.iter().zip(self.all()) {
            if param.default != Some(*value) {
                f.write_str(if first { "" } else { "," })?;
                write!(f, "{}=", param.name)?;
                param.kind.write(*value, f)?;
                first = false;
            }
        }
        Ok(())
    }

    /// Whether any differs from its default.
    pub(super) fn any_given(&self, params: &[Param]) -> bool {
        params.iter().zip(self.all()).any(|(param, value)| param.default != Some(*value))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{CompressorSpec, MEMORIES, MOMENTA, compressors::COMPRESSORS};
    use super::*;
    use proptest::prelude::*;
    use proptest::strategy::Strategy as Generator;

    /// What a text puts in front of its parameters, and their table.
    fn tables() -> Vec<(String, &'static [Param])> {
        let codecs = COMPRESSORS.iter().map(|compressor| (format!("{}(", compressor.name), compressor.params));
        let memories = MEMORIES.iter().map(|memory| (format!("onebit+ef({},", memory.name), memory.params));
        let momenta = MOMENTA.iter().map(|momentum| (format!("onebit+{}(", momentum.name), momentum.params));
        codecs.chain(memories).chain(momenta).collect()
    }

    /// Every parameter that is a number or a share, by its place.
    fn numbers() -> Vec<(String, &'static [Param], usize)> {
        let is_number = |params: &[Param], at: usize| matches!(params[at].kind, Kind::Number(..) | Kind::Kept);
        let each = |(text, params): (String, &'static [Param])| {
            let places = (0..params.len()).filter(move |at| is_number(params, *at));
            places.map(move |at| (text.clone(), params, at)).collect::<Vec<_>>()
        };
        tables().into_iter().flat_map(each).collect()
    }

    /// Numbers from all of f64, and the neighbours of 0, of 1 and of f32's ends.
    fn number() -> impl Generator<Value = f64> {
        let edges = vec![0.0, 1.0, 2.0, 100.0, f64::from(f32::MAX), f64::from(f32::from_bits(1)), 1e-9];
        let near = (prop::sample::select(edges), -40i32..0, any::<bool>())
            .prop_map(|(edge, power, up)| edge + if up { 1.0 } else { -1.0 } * edge.max(1e-46) * 10f64.powi(power));
        prop_oneof![near, prop::num::f64::ANY, (-330i32..310).prop_map(|power| 10f64.powi(power))]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        /// Codecs reckon in f32: what is accepted is in range there too, and its text is short and reads back.
        #[test]
        fn numbers_are_in_range_in_single_precision(which: prop::sample::Index, value in number()) {
            let (head, params, at) = which.get(&numbers()).clone();
            let Param { name, kind, .. } = params[at];
            let others = params.iter().filter(|param| param.default.is_none() && param.name != name);
            let other = |param: &Param| if param.kind.admits(3.0) { "3" } else { "0.5" };
            let others: String = others.map(|param| format!(",{}={}", param.name, other(param))).collect();
            let text = format!("{head}{name}={value:e}{others})");
            let Ok(strategy) = text.parse::<CompressorSpec>() else {
                prop_assert!(!kind.admits(value) || matches!(kind, Kind::Kept), "{text}");
                return Ok(());
            };
            prop_assert!(kind.admits(value), "{text}");
            if let Kind::Number(low, high) = kind {
                let single = value as f32;
                prop_assert!(single.is_finite() && (single == 0.0) == (value == 0.0), "{text} is {single}");
                let inside = match (low, high) {
                    (Bound::Excluded(low), _) if single <= low as f32 => false,
                    (_, Bound::Excluded(high)) if single >= high as f32 => false,
                    _ => true,
                };
                prop_assert!(inside, "{text} is {single}");
            }
            let canonical = strategy.to_string();
            prop_assert!(canonical.len() <= text.len() + 24, "{canonical}");
            prop_assert_eq!(canonical.parse::<CompressorSpec>().unwrap().to_string(), canonical);
        }
    }

    #[test]
    fn what_single_precision_cannot_hold_is_refused_by_name() {
        for text in [
            "onebit+ef(vanilla,gamma=1e-300)",
            "onebit+ef(vanilla,gamma=1e308)",
            "onebit+ef(vanilla,beta=1e300)",
            "onebit+ef(sgc,alpha=0.5,epsilon=1e-300)",
            "onebit+ef(efsign,gamma=1e-300)",
            "onebit+ef(dgc,mu=0.99999999999)",
            "onebit+nesterov(mu=0.99999999999)",
            "terngrad(clip=1e-300)",
            "lpcsvrg(bits=4,lambda=1e-300)",
        ] {
            let error = text.parse::<CompressorSpec>().expect_err(text).to_string();
            assert!(error.contains("as a 32-bit float"), "{text}: {error}");
        }
        // What is out of range anyway is said as before.
        let error = "onebit+nesterov(mu=1)".parse::<CompressorSpec>().unwrap_err().to_string();
        assert!(error.ends_with("it must be a number from 0 below 1"), "{error}");
    }

    #[test]
    fn extremes_are_written_with_an_exponent() {
        let canonical = |text: &str| text.parse::<CompressorSpec>().unwrap().to_string();
        assert_eq!(canonical("threshold(v=0.0000000000000000000000000001)"), "threshold(v=1e-28)");
        assert_eq!(canonical("threshold(v=12300000000000000000000)"), "threshold(v=1.23e22)");
        assert_eq!(canonical("topk(k=1e-300)"), "topk(k=1e-300)");
        assert_eq!(canonical("threshold(v=1e-6)"), "threshold(v=0.000001)");
        assert_eq!(canonical("onebitsgd(threshold=-1e30)"), "onebitsgd(threshold=-1e30)");
        assert_eq!(
            canonical("onebit+ef(efsign,gamma=0.5)+seed(18446744073709551615)"),
            "onebit+ef(efsign,gamma=0.5)+seed(18446744073709551615)"
        );
    }
}
