//! What a trainer says it ran.

use flexcomm_domain::{Collective, CompressionRatio, Invalid, Strategy};
use std::fmt;
use std::str::FromStr;

use crate::{StepsReport, StrategyWire};

/// The compressor of a [`StrategyWire`] that stands beside a text. A peer that knows no texts refuses the report by it,
/// instead of taking the steps for another strategy's.
pub const TEXT_COMPRESSOR: &str = "text";

/// Most characters of a strategy's text.
pub const MAX_STRATEGY_TEXT: usize = 256;

/// What ran in some steps.
#[derive(Debug, Clone, PartialEq)]
pub enum Ran {
    /// A strategy that a decision can name, and the cost model can price.
    Strategy(Strategy),
    /// Any other: a compressor with its parameters, memory and momentum, as the user named it. No cost model knows it.
    Text {
        /// For example `qsgd(s=16)+ef(vanilla)`: 1 to [`MAX_STRATEGY_TEXT`] printable ASCII characters.
        text: String,
        /// How its messages travel.
        collective: Collective,
    },
}

impl Ran {
    /// A strategy named by a text.
    pub fn text(text: &str, collective: Collective) -> Result<Self, Invalid> {
        let fits = (1..=MAX_STRATEGY_TEXT).contains(&text.len()) && text.bytes().all(|b| (b' '..=b'~').contains(&b));
        if !fits {
            return Err(Invalid::Text {
                what: "text of a strategy",
                value: text.chars().take(80).collect(),
                allowed: "1 to 256 printable ASCII characters",
            });
        }
        Ok(Self::Text { text: text.to_owned(), collective })
    }

    /// What a decision could name.
    pub fn strategy(&self) -> Option<Strategy> {
        match self {
            Self::Strategy(strategy) => Some(*strategy),
            Self::Text { .. } => None,
        }
    }

    /// As a message carries it: the strategy, and the text where there is one.
    pub fn to_wire(&self) -> (StrategyWire, Option<String>) {
        match self {
            Self::Strategy(strategy) => ((*strategy).into(), None),
            Self::Text { text, collective } => {
                let (cr, compressor) = (CompressionRatio::DENSE.get(), TEXT_COMPRESSOR.to_owned());
                let wire = StrategyWire { compressor, cr, collective: collective.to_string(), selection: None };
                (wire, Some(text.clone()))
            }
        }
    }

    /// Reads what [`Self::to_wire`] wrote.
    pub fn from_wire(wire: &StrategyWire, text: Option<&str>) -> Result<Self, Invalid> {
        let Some(text) = text else { return Ok(Self::Strategy(Strategy::try_from(wire)?)) };
        if wire.compressor != TEXT_COMPRESSOR || wire.selection.is_some() {
            let named: String = wire.compressor.chars().take(80).collect();
            let text = format!("a text names the strategy, and so does {named:?}: it must be {TEXT_COMPRESSOR:?}");
            return Err(Invalid::Combination(text));
        }
        Self::text(text, wire.collective.parse()?)
    }
}

impl StepsReport {
    /// What ran, checked.
    pub fn ran(&self) -> Result<Ran, Invalid> {
        Ran::from_wire(&self.strategy, self.text.as_deref())
    }
}

impl From<Strategy> for Ran {
    fn from(strategy: Strategy) -> Self {
        Self::Strategy(strategy)
    }
}

const OVER: &str = " over ";

impl fmt::Display for Ran {
    /// A strategy's canonical text, or `TEXT over COLLECTIVE`; read back by [`FromStr`].
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Strategy(strategy) => strategy.fmt(f),
            Self::Text { text, collective } => write!(f, "{text}{OVER}{collective}"),
        }
    }
}

impl FromStr for Ran {
    type Err = Invalid;
    fn from_str(text: &str) -> Result<Self, Invalid> {
        // A strategy's canonical text has no spaces.
        match text.rsplit_once(OVER) {
            Some((text, collective)) => Self::text(text, collective.parse()?),
            None => Ok(Self::Strategy(text.parse()?)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FromTrainer;
    use proptest::prelude::{prop_assert_eq, proptest};

    fn report(ran: &Ran) -> StepsReport {
        let (strategy, text) = ran.to_wire();
        StepsReport { job: "j".parse().unwrap(), rank: 0, version: 0, strategy, text, steps: Vec::new() }
    }

    proptest! {
        #[test]
        fn what_ran_is_read_back(text in "[ -~]{1,256}", which in 0usize..5) {
            let ran = Ran::text(&text, Collective::ALL[which]).unwrap();
            prop_assert_eq!(&ran.to_string().parse::<Ran>().unwrap(), &ran);
            let line = serde_json::to_string(&FromTrainer::Steps(report(&ran))).unwrap();
            let FromTrainer::Steps(read) = serde_json::from_str(&line).unwrap() else { panic!("{line}") };
            prop_assert_eq!(read.ran().unwrap(), ran);
        }
    }

    #[test]
    fn a_peer_that_knows_no_texts_refuses_the_strategy() {
        let ran = Ran::text("qsgd(s=16)", Collective::Allgather).unwrap();
        let error = Strategy::try_from(&report(&ran).strategy).unwrap_err().to_string();
        assert!(error.contains("compressor \"text\""), "{error}");
    }

    #[test]
    fn reports_without_a_text_are_what_they_were() {
        let strategy: Strategy = "topk@0.01/art-ring:star".parse().unwrap();
        let old = r#"{"kind":"steps","job":"j","rank":0,"version":3,"strategy":{"compressor":"topk","cr":0.01,
            "collective":"art-ring","selection":"star"},"steps":[]}"#;
        let FromTrainer::Steps(read) = serde_json::from_str(old).unwrap() else { panic!() };
        assert_eq!(read.ran().unwrap(), Ran::Strategy(strategy));
        assert_eq!(Ran::Strategy(strategy).to_string().parse(), Ok(Ran::Strategy(strategy)));
        assert!(!serde_json::to_string(&report(&strategy.into())).unwrap().contains("text"));
    }

    #[test]
    fn texts_that_say_nothing_or_contradict_are_refused() {
        for bad in ["", "qsgd\n", "qsgd\u{e9}", &"x".repeat(257)] {
            assert!(Ran::text(bad, Collective::Allgather).is_err(), "{bad:?}");
        }
        let mut both = report(&Strategy::DENSE_RING.into());
        both.text = Some("qsgd(s=16)".into());
        assert!(both.ran().unwrap_err().to_string().contains("none"));
        let mut neither = report(&Ran::text("qsgd", Collective::Allgather).unwrap());
        neither.text = None;
        assert!(neither.ran().is_err());
    }
}
