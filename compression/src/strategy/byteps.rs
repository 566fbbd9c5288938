//! BytePS's map of strings: the keys of its code, and those of its design text where they differ.

use super::{Strategy, StrategyError};
use crate::memory::MEMORIES;
use crate::momentum::MOMENTA;

/// A key and what it sets.
enum Sets {
    /// The compressor.
    Codec,
    /// A parameter of the compressor.
    Param(&'static str, Translate),
    /// The kind of error feedback.
    Memory,
    /// The kind of momentum.
    Momentum,
    /// A parameter of the momentum.
    MomentumParam(&'static str),
    /// The seed of all randomness.
    Seed,
}

/// BytePS's value in our words.
enum Translate {
    Same,
    /// (BytePS's, ours).
    Words(&'static [(&'static str, &'static str)]),
}

use Translate::{Same, Words};

const SWITCH: Translate =
    Words(&[("true", "true"), ("True", "true"), ("1", "true"), ("false", "false"), ("False", "false"), ("0", "false")]);

const KEYS: &[(&str, Sets)] = &[
    ("byteps_compressor_type", Sets::Codec),
    ("byteps_compressor_k", Sets::Param("k", Same)),
    ("byteps_compressor_onebit_scaling", Sets::Param("scaling", SWITCH)),
    ("byteps_dithering_partition", Sets::Param("partition", Words(&[("0", "linear"), ("1", "natural")]))),
    ("byteps_dithering_normalize", Sets::Param("normalize", Words(&[("0", "max"), ("1", "l2")]))),
    ("byteps_seed", Sets::Seed),
    ("byteps_ef_type", Sets::Memory),
    ("byteps_error_feedback_type", Sets::Memory),
    ("byteps_momentum_type", Sets::Momentum),
    ("byteps_momentum_mu", Sets::MomentumParam("mu")),
];

impl Strategy {
    /// From BytePS's map. A key that it does not know, a value out of range and a missing k are refused; a key that is
    /// given in both spellings too.
    pub fn from_byteps<'a>(map: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self, StrategyError> {
        let mut text = Parts::default();
        for (key, value) in map {
            let known = || StrategyError::unknown("BytePS key", key, KEYS.iter().map(|(key, _)| *key));
            let (_, sets) = KEYS.iter().find(|(known, _)| *known == key).ok_or_else(known)?;
            text.set(key, sets, value)?;
        }
        text.write()?.parse()
    }
}

/// The textual form in parts.
#[derive(Default)]
struct Parts {
    codec: Option<String>,
    params: Vec<String>,
    memory: Option<String>,
    momentum: Option<String>,
    momentum_params: Vec<String>,
    seed: Option<String>,
}

impl Parts {
    fn set(&mut self, key: &str, sets: &Sets, value: &str) -> Result<(), StrategyError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        if value.is_empty() || !value.chars().all(plain) {
            return Err(refused(key, value, "a word or a number".into()));
        }
        match sets {
            Sets::Codec => once(&mut self.codec, key, value),
            Sets::Memory => {
                named(key, value, MEMORIES.iter().map(|memory| memory.name))?;
                once(&mut self.memory, key, value)
            }
            Sets::Momentum => {
                named(key, value, MOMENTA.iter().map(|momentum| momentum.name))?;
                once(&mut self.momentum, key, value)
            }
            Sets::Seed => once(&mut self.seed, key, value),
            Sets::MomentumParam(name) => {
                self.momentum_params.push(format!("{name}={value}"));
                Ok(())
            }
            Sets::Param(name, translate) => {
                self.params.push(format!("{name}={}", translate.value(key, value)?));
                Ok(())
            }
        }
    }

    fn write(self) -> Result<String, StrategyError> {
        let missing =
            |key: &'static str, of: &str| StrategyError::Missing { of: of.into(), key, allowed: "a name".into() };
        let codec = self.codec.ok_or_else(|| missing("byteps_compressor_type", "a strategy"))?;
        let mut text = format!("{codec}({})", self.params.join(","));
        if let Some(memory) = self.memory {
            text += &format!("+ef({memory})");
        }
        match self.momentum {
            Some(momentum) => text += &format!("+{momentum}({})", self.momentum_params.join(",")),
            None if !self.momentum_params.is_empty() => return Err(missing("byteps_momentum_type", "a momentum")),
            None => {}
        }
        if let Some(seed) = self.seed {
            text += &format!("+seed({seed})");
        }
        Ok(text)
    }
}

/// Refuses words that mean something elsewhere in the textual form.
fn named<'a>(key: &str, value: &str, names: impl Iterator<Item = &'a str>) -> Result<(), StrategyError> {
    let names: Vec<&str> = names.collect();
    if names.contains(&value) { Ok(()) } else { Err(refused(key, value, names.join(" or "))) }
}

fn refused(key: &str, value: &str, allowed: String) -> StrategyError {
    StrategyError::Range { of: "BytePS's map".into(), key: key.into(), value: value.into(), allowed }
}

fn once(slot: &mut Option<String>, key: &str, value: &str) -> Result<(), StrategyError> {
    match slot.replace(value.into()) {
        Some(_) => Err(StrategyError::Twice { of: "BytePS's map".into(), key: key.into() }),
        None => Ok(()),
    }
}

impl Translate {
    fn value<'a>(&self, key: &str, value: &'a str) -> Result<&'a str, StrategyError> {
        let Words(words) = self else { return Ok(value) };
        let found = words.iter().find(|(theirs, _)| *theirs == value).map(|(_, ours)| *ours);
        let allowed = || words.iter().map(|(theirs, _)| *theirs).collect::<Vec<_>>().join(" or ");
        found.ok_or_else(|| refused(key, value, allowed()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_are_read() {
        for ef in ["byteps_ef_type", "byteps_error_feedback_type"] {
            let map = [
                ("byteps_compressor_type", "topk"),
                ("byteps_compressor_k", "3"),
                (ef, "vanilla"),
                ("byteps_momentum_type", "nesterov"),
                ("byteps_momentum_mu", "0.9"),
            ];
            let strategy = Strategy::from_byteps(map).unwrap();
            assert_eq!(strategy.to_string(), "topk(k=3)+ef(vanilla)+nesterov(mu=0.9)");
        }
        let map = [("byteps_compressor_type", "onebit"), ("byteps_compressor_onebit_scaling", "True")];
        assert_eq!(Strategy::from_byteps(map).unwrap(), "onebit(scaling=true)".parse().unwrap());
    }

    #[test]
    fn errors_name_key_and_value() {
        let error =
            |map: &[(&'static str, &'static str)]| Strategy::from_byteps(map.iter().copied()).unwrap_err().to_string();
        let topk = ("byteps_compressor_type", "topk");
        assert!(error(&[]).contains("byteps_compressor_type"));
        assert!(error(&[topk]).contains("without k"));
        assert!(error(&[topk, ("byteps_compressor_k", "0")]).contains("\"0\""));
        assert!(error(&[topk, ("byteps_compressor_kk", "1")]).contains("\"byteps_compressor_kk\""));
        assert!(error(&[topk, ("byteps_compressor_k", "1)+ef(vanilla")]).contains("word or a number"));
        for (key, known) in [("byteps_momentum_type", "nesterov"), ("byteps_ef_type", "vanilla")] {
            for value in ["checksum", "ef", "no"] {
                let error = error(&[topk, ("byteps_compressor_k", "1"), (key, value)]);
                let named = [key, &format!("{value:?}"), known].iter().all(|part| error.contains(*part));
                assert!(named, "{error}");
            }
        }
        let both = [
            topk,
            ("byteps_compressor_k", "1"),
            ("byteps_ef_type", "vanilla"),
            ("byteps_error_feedback_type", "vanilla"),
        ];
        assert!(error(&both).contains("twice"));
        assert!(
            error(&[topk, ("byteps_compressor_k", "1"), ("byteps_momentum_mu", "0.9")])
                .contains("byteps_momentum_type")
        );
        assert!(
            error(&[("byteps_compressor_type", "onebit"), ("byteps_compressor_onebit_scaling", "maybe")])
                .contains("\"maybe\"")
        );
    }
}
