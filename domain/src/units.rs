//! Scalars with a unit. Serialised as plain numbers in SI units; the wire adds unit names to its fields.

use crate::Invalid;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

macro_rules! scalar {
    ($(#[$doc:meta])* $name:ident, $what:literal, $allowed:literal, $ok:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Serialize, Deserialize)]
        #[serde(try_from = "f64", into = "f64")]
        pub struct $name(f64);

        impl $name {
            /// Validates and wraps; the error names the value and the allowed range.
            pub fn new(value: f64) -> Result<Self, Invalid> {
                let ok: fn(f64) -> bool = $ok;
                if value.is_finite() && ok(value) {
                    Ok(Self(value))
                } else {
                    Err(Invalid::Range { what: $what, value, allowed: $allowed.into() })
                }
            }

            /// The number in this type's SI unit.
            pub const fn get(self) -> f64 {
                self.0
            }
        }

        impl TryFrom<f64> for $name {
            type Error = Invalid;
            fn try_from(value: f64) -> Result<Self, Invalid> {
                Self::new(value)
            }
        }

        impl From<$name> for f64 {
            fn from(value: $name) -> f64 {
                value.0
            }
        }
    };
}

scalar!(
    /// A duration in seconds, from 0 to one year.
    Seconds, "duration in seconds", "0 to 31,536,000", |v| (0.0..=31_536_000.0).contains(&v)
);
scalar!(
    /// A link's bandwidth in bits per second, from 1 kbit/s to 100 Tbit/s.
    Bandwidth, "bandwidth in bit/s", "1e3 to 1e14", |v| (1e3..=1e14).contains(&v)
);
scalar!(
    /// CR, c: the kept share k/n of a gradient's values, in (0, 1]; 1 is dense, smaller compresses more.
    CompressionRatio, "compression ratio", "above 0, at most 1", |v| v > 0.0 && v <= 1.0
);
scalar!(
    /// Compression gain E‖g_c‖² / E‖g_e‖²: energy kept of the compensated gradient, in (0, 1].
    Gain, "gain", "above 0, at most 1", |v| v > 0.0 && v <= 1.0
);

impl Seconds {
    /// No time at all.
    pub const ZERO: Self = Self(0.0);
}

impl Bandwidth {
    /// beta: seconds per byte.
    pub fn beta(self) -> f64 {
        8.0 / self.0
    }

    /// From beta in seconds per byte.
    pub fn from_beta(beta: f64) -> Result<Self, Invalid> {
        Self::new(8.0 / beta)
    }
}

impl CompressionRatio {
    /// Nothing left out.
    pub const DENSE: Self = Self(1.0);

    /// Whether every value travels.
    pub fn is_dense(self) -> bool {
        self.0 == 1.0
    }

    /// k for a tensor of `n` values: round(c * n), at least 1, at most n; 0 for an empty tensor.
    pub fn keep(self, n: usize) -> usize {
        if n == 0 {
            return 0;
        }
        ((self.0 * n as f64).round() as usize).clamp(1, n)
    }
}

impl Gain {
    /// Nothing lost.
    pub const FULL: Self = Self(1.0);
}

impl fmt::Display for CompressionRatio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = self.0;
        if s >= 1.0 {
            write!(f, "{s:.3} s")
        } else if s >= 1e-3 {
            write!(f, "{:.3} ms", s * 1e3)
        } else {
            write!(f, "{:.1} µs", s * 1e6)
        }
    }
}

impl fmt::Display for Bandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let b = self.0;
        if b >= 1e9 {
            write!(f, "{:.4} Gbit/s", b / 1e9)
        } else if b >= 1e6 {
            write!(f, "{:.4} Mbit/s", b / 1e6)
        } else {
            write!(f, "{:.4} kbit/s", b / 1e3)
        }
    }
}

fn split_unit(text: &str) -> Option<(f64, String)> {
    let text = text.trim();
    let at = text.find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '-' | '+'))).unwrap_or(text.len());
    // "1e-3s": an exponent belongs to the number.
    let at = match text[at..].strip_prefix(['e', 'E']) {
        Some(rest) if rest.starts_with(|c: char| c.is_ascii_digit() || c == '-') => {
            let tail = rest.find(|c: char| !(c.is_ascii_digit() || c == '-')).unwrap_or(rest.len());
            at + 1 + tail
        }
        _ => at,
    };
    let number = text[..at].parse().ok()?;
    Some((number, text[at..].trim().to_ascii_lowercase()))
}

impl FromStr for Seconds {
    type Err = Invalid;

    /// Reads `1ms`, `250us`, `0.5s`, `2m`, `1h`. A number without a unit is refused: it would be a guess.
    fn from_str(text: &str) -> Result<Self, Invalid> {
        const HELP: &str = "a number with a unit: ns, us, ms, s, m or h (for example 1ms)";
        let (number, unit) = split_unit(text).ok_or_else(|| Invalid::text("duration", text, HELP))?;
        let scale = match unit.as_str() {
            "ns" => 1e-9,
            "us" | "µs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" | "min" => 60.0,
            "h" => 3600.0,
            _ => return Err(Invalid::text("duration", text, HELP)),
        };
        Self::new(number * scale)
    }
}

impl FromStr for Bandwidth {
    type Err = Invalid;

    /// Reads `10gbit`, `250mbit`, `100kbit`, also with `/s` behind. `1GB` and `1gbps` are refused: they are bytes to some
    /// (tc among them) and bits to others.
    fn from_str(text: &str) -> Result<Self, Invalid> {
        const HELP: &str = "a number with a unit in bits: kbit, mbit, gbit or tbit (for example 10gbit)";
        let (number, unit) = split_unit(text).ok_or_else(|| Invalid::text("bandwidth", text, HELP))?;
        let unit = unit.trim_end_matches("/s");
        let scale = match unit {
            "bit" => 1.0,
            "kbit" => 1e3,
            "mbit" => 1e6,
            "gbit" => 1e9,
            "tbit" => 1e12,
            _ => return Err(Invalid::text("bandwidth", text, HELP)),
        };
        Self::new(number * scale)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_nonsense() {
        for v in [f64::NAN, f64::INFINITY, -1.0] {
            assert!(Seconds::new(v).is_err());
            assert!(Bandwidth::new(v).is_err());
            assert!(CompressionRatio::new(v).is_err());
            assert!(Gain::new(v).is_err());
        }
        assert!(CompressionRatio::new(0.0).is_err());
        assert!(CompressionRatio::new(1.0 + 1e-12).is_err());
        let error = Gain::new(1.5).unwrap_err().to_string();
        assert_eq!(error, "gain is 1.5, allowed is above 0, at most 1");
    }

    #[test]
    fn reads_units() {
        assert_eq!("1ms".parse::<Seconds>().unwrap().get(), 1e-3);
        assert_eq!("1e-3s".parse::<Seconds>().unwrap().get(), 1e-3);
        assert_eq!("10gbit".parse::<Bandwidth>().unwrap().get(), 1e10);
        assert_eq!("2.5 Gbit/s".parse::<Bandwidth>().unwrap().get(), 2.5e9);
        for bad in ["", "ms", "1", "1 parsec", "-1ms", "nanms"] {
            assert!(bad.parse::<Seconds>().is_err(), "{bad:?} was accepted");
        }
        for bad in ["10", "1GB", "100Mbps", "1 gb/s"] {
            assert!(bad.parse::<Bandwidth>().is_err(), "{bad:?} was accepted");
        }
    }

    #[test]
    fn keep_counts_values() {
        let c = CompressionRatio::new(0.001).unwrap();
        assert_eq!(c.keep(0), 0);
        assert_eq!(c.keep(10), 1);
        assert_eq!(c.keep(10_000), 10);
        assert_eq!(CompressionRatio::DENSE.keep(7), 7);
    }

    #[test]
    fn json_is_validated() {
        assert!(serde_json::from_str::<Gain>("0.5").is_ok());
        assert!(serde_json::from_str::<Gain>("2.0").is_err());
        assert!(serde_json::from_str::<Seconds>("-0.1").is_err());
    }
}
