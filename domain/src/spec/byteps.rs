//! BytePS's map of strings: the keys of its users' scripts (`compressor`, `k`, ...), those of its core (`byteps_compressor_type`,
//! `byteps_compressor_k`, ...) and of its registry (`compressor_type`, `ef_type`, `momentum_type`), and for error feedback that of
//! its design text as well.
//!
//! A setting is given once, whichever spelling is taken. Values are those of Python or C++: `True`, `true` and `1` switch on. A
//! setting that the compressor does not have is refused, but for two that the design text's script gives with every
//! compressor, from the defaults of its options: `scaling` switched off, which asks for nothing, and `k`, which means nothing
//! to `onebit`. An `ef` or `momentum` that is empty or `None` is an option that was not given.
//!
//! The design text has no key for mu: BytePS's plugin takes it from the optimiser. Here a map of the users' keys may give it
//! as `mu`; without, it is 0.9, which the optimiser has in BytePS's own script for these options (the default of `--momentum` in
//! `train_cifar100_byteps_gc.py`). The canonical text shows it. The core's keys have one for mu, which must be given.

use super::parts::{MEMORIES, MOMENTA};
use super::{CompressorSpec, SpecError};

/// A setting and where it goes.
struct Setting {
    /// Spellings; the first is the users'.
    keys: &'static [&'static str],
    part: Place,
    /// Name of the parameter within the part; empty for the part's own name.
    param: &'static str,
    values: Translate,
}

#[derive(Clone, Copy, PartialEq)]
enum Place {
    Codec,
    Memory,
    Momentum,
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
const PARTITION: Translate = Words(&[("0", "linear"), ("1", "natural"), ("linear", "linear"), ("natural", "natural")]);
const NORMALIZE: Translate = Words(&[("0", "max"), ("1", "l2"), ("max", "max"), ("l2", "l2")]);

const fn setting(keys: &'static [&'static str], part: Place, param: &'static str, values: Translate) -> Setting {
    Setting { keys, part, param, values }
}

const SETTINGS: &[Setting] = &[
    setting(&["compressor", "byteps_compressor_type", "compressor_type"], Place::Codec, "", Same),
    setting(&["k", "byteps_compressor_k", "compressor_k"], Place::Codec, "k", Same),
    setting(
        &["scaling", "byteps_compressor_onebit_scaling", "compressor_onebit_scaling"],
        Place::Codec,
        "scaling",
        SWITCH,
    ),
    setting(&["partition", "byteps_dithering_partition", "dithering_partition"], Place::Codec, "partition", PARTITION),
    setting(&["normalize", "byteps_dithering_normalize", "dithering_normalize"], Place::Codec, "normalize", NORMALIZE),
    setting(&["ef", "byteps_ef_type", "byteps_error_feedback_type", "ef_type"], Place::Memory, "", Same),
    setting(&["momentum", "byteps_momentum_type", "momentum_type"], Place::Momentum, "", Same),
    setting(&["mu", "byteps_momentum_mu", "momentum_mu"], Place::Momentum, "mu", Same),
    setting(&["seed", "byteps_seed"], Place::Seed, "", Same),
];

const MAP: &str = "BytePS's map";

/// mu where the users' keys give none.
const MU: &str = "0.9";

impl CompressorSpec {
    /// From BytePS's map. A key that it does not know, a value out of range and a missing k are refused, by the key as it was
    /// given; so is a setting that is given twice. A momentum without `mu` has 0.9.
    pub fn from_byteps<'a>(map: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self, SpecError> {
        let mut given = Map::default();
        for (key, value) in map {
            given.set(key, value)?;
        }
        given.read()
    }
}

/// A setting as given.
struct Given<'a> {
    setting: &'static Setting,
    key: &'a str,
    /// In our words.
    value: &'a str,
}

#[derive(Default)]
struct Map<'a> {
    given: Vec<Given<'a>>,
}

impl<'a> Map<'a> {
    fn set(&mut self, key: &'a str, value: &'a str) -> Result<(), SpecError> {
        let known = || SETTINGS.iter().flat_map(|setting| setting.keys).copied();
        let setting = SETTINGS.iter().find(|setting| setting.keys.contains(&key));
        let setting = setting.ok_or_else(|| SpecError::unknown("BytePS key", key, known()))?;
        let optional = matches!((setting.part, setting.param), (Place::Memory | Place::Momentum, ""));
        if optional && ["", "None"].contains(&value) {
            return Ok(());
        }
        // What means something in the textual form cannot be smuggled in.
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        if value.is_empty() || !value.chars().all(plain) {
            return Err(refused(key, value, "a word or a number".into()));
        }
        if let Some(before) = self.given.iter().find(|given| std::ptr::eq(given.setting, setting)) {
            let key = if before.key == key { key.into() } else { format!("{} (also as {key})", before.key) };
            return Err(SpecError::Twice { of: MAP.into(), key });
        }
        match (setting.part, setting.param) {
            (Place::Memory, "") => named(key, value, MEMORIES.iter().map(|memory| memory.name))?,
            (Place::Momentum, "") => named(key, value, MOMENTA.iter().map(|momentum| momentum.name))?,
            _ => {}
        }
        self.given.push(Given { setting, key, value: setting.values.of(key, value)? });
        Ok(())
    }

    fn read(mut self) -> Result<CompressorSpec, SpecError> {
        let codec = self.name_of(Place::Codec).ok_or_else(|| self.missing("compressor", "a strategy", "a name"))?;
        self.leave_out(codec)?;
        self.fill_in_mu();
        let mut text = self.part(codec, Place::Codec);
        if let Some(memory) = self.name_of(Place::Memory) {
            text += &format!("+ef({memory})");
        }
        match self.name_of(Place::Momentum) {
            Some(momentum) => text += &format!("+{}", self.part(momentum, Place::Momentum)),
            None if self.given.iter().any(|given| given.setting.part == Place::Momentum) => {
                return Err(self.missing("momentum", "a momentum", "a name"));
            }
            None => {}
        }
        if let Some(seed) = self.name_of(Place::Seed) {
            text += &format!("+seed({seed})");
        }
        text.parse().map_err(|error| self.in_their_words(error))
    }

    fn name_of(&self, part: Place) -> Option<&'a str> {
        let own = |given: &&Given<'_>| given.setting.part == part && given.setting.param.is_empty();
        self.given.iter().find(own).map(|given| given.value)
    }

    /// Drops what scripts give with every compressor and this one does not have.
    fn leave_out(&mut self, codec: &str) -> Result<(), SpecError> {
        // One that is not known is refused later.
        let Ok(compressor) = super::find(codec) else { return Ok(()) };
        let has = |name: &str| compressor.params.iter().any(|param| param.name == name);
        let is_number = |value: &str| value.parse::<f64>().is_ok_and(|k| k.is_finite() && k > 0.0);
        let idle = |given: &&Given<'_>| given.setting.param == "k" && !has("k");
        if let Some(given) = self.given.iter().filter(idle).find(|given| !is_number(given.value)) {
            return Err(refused(given.key, given.value, "a number above 0".into()));
        }
        self.given.retain(|given| match given.setting.param {
            "k" => has("k"),
            "scaling" => has("scaling") || given.value != "false",
            _ => true,
        });
        Ok(())
    }

    /// The users' keys have none for mu.
    fn fill_in_mu(&mut self) {
        let users = |given: &Given<'_>| given.setting.keys[0] == "momentum" && !given.key.starts_with("byteps_");
        let has_mu = self.given.iter().any(|given| given.setting.param == "mu");
        let setting = SETTINGS.iter().find(|setting| setting.param == "mu");
        if let Some(setting) = setting.filter(|_| !has_mu && self.given.iter().any(users)) {
            self.given.push(Given { setting, key: setting.keys[0], value: MU });
        }
    }

    fn part(&self, name: &str, part: Place) -> String {
        let params = self.given.iter().filter(|given| given.setting.part == part && !given.setting.param.is_empty());
        let params: Vec<String> = params.map(|given| format!("{}={}", given.setting.param, given.value)).collect();
        format!("{name}({})", params.join(","))
    }

    /// The spelling of a setting that goes with the others': the core's where the compressor has its key.
    fn spelled(&self, setting: &'static Setting) -> &'static str {
        let core = self.given.first().is_some_and(|given| given.key.starts_with("byteps_"));
        setting.keys[usize::from(core).min(setting.keys.len() - 1)]
    }

    fn missing(&self, first: &str, of: &str, allowed: &str) -> SpecError {
        let setting = SETTINGS.iter().find(|setting| setting.keys[0] == first).unwrap_or(&SETTINGS[0]);
        SpecError::Missing { of: of.into(), key: self.spelled(setting), allowed: allowed.into() }
    }

    /// Names the key as it was given, or as it would have been.
    fn in_their_words(&self, error: SpecError) -> SpecError {
        let setting_of = |name: &str| SETTINGS.iter().find(|setting| setting.param == name || setting.keys[0] == name);
        let given_as =
            |name: &str| self.given.iter().find(|given| given.setting.keys[0] == name).map(|given| given.key);
        match error {
            SpecError::Missing { of, key, allowed } => {
                let key = setting_of(key).map_or(key, |setting| self.spelled(setting));
                SpecError::Missing { of, key, allowed }
            }
            SpecError::Range { of, key, value, allowed } => {
                let key = given_as(&key).map_or(key, str::to_owned);
                SpecError::Range { of, key, value, allowed }
            }
            SpecError::UnknownKey { of, key, known } => {
                let key = given_as(&key).map_or(key, str::to_owned);
                SpecError::UnknownKey { of, key, known }
            }
            other => other,
        }
    }
}

/// Refuses words that mean something elsewhere in the textual form.
fn named<'a>(key: &str, value: &str, names: impl Iterator<Item = &'a str>) -> Result<(), SpecError> {
    let names: Vec<&str> = names.collect();
    if names.contains(&value) { Ok(()) } else { Err(refused(key, value, names.join(" or "))) }
}

fn refused(key: &str, value: &str, allowed: String) -> SpecError {
    SpecError::Range { of: MAP.into(), key: key.into(), value: value.into(), allowed }
}

impl Translate {
    fn of<'a>(&self, key: &str, value: &'a str) -> Result<&'a str, SpecError> {
        let Words(words) = self else { return Ok(value) };
        let found = words.iter().find(|(theirs, _)| *theirs == value).map(|(_, ours)| *ours);
        let allowed = || words.iter().map(|(theirs, _)| *theirs).collect::<Vec<_>>().join(" or ");
        found.ok_or_else(|| refused(key, value, allowed()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(map: &[(&str, &str)]) -> String {
        CompressorSpec::from_byteps(map.iter().copied())
            .unwrap_or_else(|e| panic!("{map:?}: failed to {e}"))
            .to_string()
    }

    fn error(map: &[(&str, &str)]) -> String {
        CompressorSpec::from_byteps(map.iter().copied()).unwrap_err().to_string()
    }

    /// The design text's script builds its map from its options, word by word: always these five keys, and no other.
    #[test]
    fn the_map_of_the_design_text_is_read() {
        let script = |compressor, ef, momentum, scaling, k| {
            let keys = ["compressor", "ef", "momentum", "scaling", "k"];
            keys.into_iter().zip([compressor, ef, momentum, scaling, k]).collect::<Vec<_>>()
        };
        for (compressor, scaling, k, strategy) in [
            ("onebit", "True", "1", "onebit(scaling=true)"),
            ("onebit", "False", "1.0", "onebit"),
            ("topk", "False", "1", "topk(k=1)"),
            ("randomk", "False", "8", "randomk(k=8)"),
            ("dithering", "False", "4", "dithering(k=4)"),
        ] {
            let map = script(compressor, "vanilla", "nesterov", scaling, k);
            assert_eq!(read(&map), format!("{strategy}+ef(vanilla)+nesterov(mu=0.9)"));
            // Options that were not given.
            for none in ["", "None"] {
                assert_eq!(read(&script(compressor, "vanilla", none, scaling, k)), format!("{strategy}+ef(vanilla)"));
                assert_eq!(read(&script(compressor, none, none, scaling, k)), strategy);
            }
            let with_mu = [map, vec![("mu", "0.5")]].concat();
            assert_eq!(read(&with_mu), format!("{strategy}+ef(vanilla)+nesterov(mu=0.5)"));
        }
    }

    /// The table's keys, and ours for what is none of them.
    #[test]
    fn the_keys_of_the_design_text_are_read() {
        let script = |compressor, scaling| {
            [
                ("compressor", compressor),
                ("ef", "vanilla"),
                ("momentum", "nesterov"),
                ("scaling", scaling),
                ("mu", "0.9"),
            ]
        };
        let with_k = |compressor, k| [&script(compressor, "False")[..], &[("k", k), ("seed", "2020")]].concat();
        assert_eq!(read(&with_k("topk", "3")), "topk(k=3)+ef(vanilla)+nesterov(mu=0.9)+seed(2020)");
        assert_eq!(read(&with_k("randomk", "8")), "randomk(k=8)+ef(vanilla)+nesterov(mu=0.9)+seed(2020)");
        assert_eq!(read(&with_k("dithering", "4")), "dithering(k=4)+ef(vanilla)+nesterov(mu=0.9)+seed(2020)");
        assert_eq!(read(&script("onebit", "True")), "onebit(scaling=true)+ef(vanilla)+nesterov(mu=0.9)");
        // Scaling is off if nothing is said of it.
        assert_eq!(read(&[("compressor", "onebit")]), "onebit");
        assert_eq!(
            read(&[("compressor", "dithering"), ("k", "7"), ("partition", "natural"), ("normalize", "l2")]),
            "dithering(k=7,partition=natural,normalize=l2)"
        );
    }

    /// The dictionary that the design text shows for its core, and the keys of the core's code.
    #[test]
    fn the_keys_of_the_core_are_read() {
        let shown = [
            ("byteps_compressor_type", "topk"),
            ("byteps_compressor_k", "3"),
            ("byteps_error_feedback_type", "vanilla"),
        ];
        assert_eq!(read(&shown), "topk(k=3)+ef(vanilla)");
        let map = [
            ("byteps_compressor_type", "topk"),
            ("byteps_compressor_k", "3"),
            ("byteps_ef_type", "vanilla"),
            ("byteps_momentum_type", "nesterov"),
            ("byteps_momentum_mu", "0.9"),
            ("byteps_seed", "7"),
        ];
        assert_eq!(read(&map), "topk(k=3)+ef(vanilla)+nesterov(mu=0.9)+seed(7)");
        let registry =
            [("compressor_type", "topk"), ("compressor_k", "3"), ("ef_type", "vanilla"), ("momentum_type", "nesterov")];
        assert_eq!(read(&registry), "topk(k=3)+ef(vanilla)+nesterov(mu=0.9)");
        let map = [("byteps_compressor_type", "onebit"), ("byteps_compressor_onebit_scaling", "1")];
        assert_eq!(read(&map), "onebit(scaling=true)");
        let map = [
            ("byteps_compressor_type", "dithering"),
            ("byteps_compressor_k", "4"),
            ("byteps_dithering_partition", "1"),
        ];
        assert_eq!(read(&map), "dithering(k=4,partition=natural)");
    }

    /// A map, and what its error says.
    type Case<'a> = (&'a [(&'a str, &'a str)], &'a [&'a str]);

    /// Key as given, value, and what is allowed.
    #[test]
    fn errors_name_key_value_and_range() {
        let (topk, core) = (("compressor", "topk"), ("byteps_compressor_type", "topk"));
        let cases: &[Case<'_>] = &[
            (&[], &["without compressor", "a name"]),
            (&[("byteps_compressor_k", "1")], &["without byteps_compressor_type"]),
            (&[("compressor", "topq"), ("k", "1")], &["compressor \"topq\"", "topk"]),
            (&[topk], &["topk without k", "above 0 and below 1"]),
            (&[core], &["topk without byteps_compressor_k", "above 0 and below 1"]),
            (&[topk, ("k", "0")], &["set k of topk to \"0\"", "above 0 and below 1"]),
            (&[topk, ("k", "1.0")], &["set k of topk to \"1.0\"", "1.0 would be either"]),
            (&[core, ("byteps_compressor_k", "-3")], &["set byteps_compressor_k of topk to \"-3\"", "from 1 to"]),
            (&[("compressor", "dithering"), ("k", "0.5")], &["set k of dithering to \"0.5\"", "whole number from 1"]),
            (&[("compressor", "onebit"), ("k", "many")], &["set k", "\"many\"", "a number above 0"]),
            (&[("compressor", "onebit"), ("k", "0")], &["set k", "\"0\"", "a number above 0"]),
            (&[("compressor", "onebit"), ("partition", "1")], &["set \"partition\" of onebit", "it takes scaling"]),
            (&[topk, ("k", "1"), ("scaling", "True")], &["set \"scaling\" of topk", "it takes k"]),
            (&[("compressor", "onebit"), ("scaling", "maybe")], &["scaling", "\"maybe\"", "true or True"]),
            (&[topk, ("kk", "1")], &["BytePS key \"kk\"", "did you mean k?"]),
            (&[topk, ("zebra", "1")], &["BytePS key \"zebra\"", "compressor", "byteps_compressor_type", "seed"]),
            (&[topk, ("k", "1)+ef(vanilla")], &["set k", "a word or a number"]),
            (&[topk, ("k", "")], &["set k", "\"\"", "a word or a number"]),
            (&[topk, ("k", "1"), ("ef", "dgc,mu=0")], &["set ef", "a word or a number"]),
            (&[topk, ("k", "1"), ("seed", "x")], &["set seed", "\"x\"", "whole number from 0"]),
            (&[topk, ("k", "1"), ("mu", "0.9")], &["without momentum"]),
            (
                &[core, ("byteps_compressor_k", "1"), ("byteps_momentum_type", "nesterov")],
                &["nesterov without byteps_momentum_mu", "below 1"],
            ),
            (&[topk, ("k", "1"), ("momentum", ""), ("mu", "0.9")], &["without momentum"]),
            (&[("compressor", ""), ("k", "1")], &["set compressor", "\"\"", "a word or a number"]),
            (&[topk, ("k", "1"), ("momentum", "nesterov"), ("mu", "1")], &["set mu of nesterov to \"1\"", "below 1"]),
            (&[topk, core, ("k", "1")], &["set compressor (also as byteps_compressor_type) of BytePS's map twice"]),
            (&[core, ("byteps_ef_type", "vanilla"), ("byteps_error_feedback_type", "vanilla")], &["twice"]),
        ];
        for (map, parts) in cases {
            let error = error(map);
            assert!(parts.iter().all(|part| error.contains(part)), "{map:?}: {error}");
        }
        for (key, known) in [("momentum", "nesterov"), ("ef", "vanilla")] {
            for key in [key.to_owned(), format!("byteps_{key}_type")] {
                for value in ["checksum", "ef", "no"] {
                    let error = error(&[topk, ("k", "1"), (&key, value)]);
                    let named = [&key, &format!("{value:?}"), known].iter().all(|part| error.contains(*part));
                    assert!(named, "{error}");
                }
            }
        }
    }
}
