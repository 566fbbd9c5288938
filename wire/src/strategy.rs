//! A strategy on its way.

use flexcomm_domain::{Invalid, Plan, Strategy, strategy_text};
use serde::{Deserialize, Deserializer, Serialize};

/// A strategy's or a plan's text as a peer wrote it; checked by `TryFrom` into [`Strategy`] or [`Plan`]. In JSON it is a string. The object of
/// protocol 1 (`compressor`, `cr`, `collective`, `selection`) is read, too: agents keep reports across updates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct StrategyWire(pub String);

impl<'de> Deserialize<'de> for StrategyWire {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = strategy_text(deserializer)?;
        // What was stored by protocol 1 is passed on as this one writes it.
        let before = text.contains('@').then(|| text.parse::<Strategy>().ok()).flatten();
        Ok(before.map_or(Self(text), Self::from))
    }
}

impl From<Strategy> for StrategyWire {
    fn from(strategy: Strategy) -> Self {
        Self(strategy.to_string())
    }
}

impl From<&Plan> for StrategyWire {
    fn from(plan: &Plan) -> Self {
        Self(plan.to_string())
    }
}

impl TryFrom<&StrategyWire> for Plan {
    type Error = Invalid;

    fn try_from(wire: &StrategyWire) -> Result<Self, Invalid> {
        wire.0.parse()
    }
}

impl TryFrom<&StrategyWire> for Strategy {
    type Error = Invalid;

    fn try_from(wire: &StrategyWire) -> Result<Self, Invalid> {
        wire.0.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<Strategy, Invalid> {
        Strategy::try_from(&serde_json::from_str::<StrategyWire>(json).unwrap())
    }

    #[test]
    fn both_forms_are_read_and_one_is_written() {
        let now = r#""topk(k=0.01)+ef(vanilla)/art-ring:star""#;
        let before = r#"{"compressor":"topk","cr":0.01,"collective":"art-ring","selection":"star"}"#;
        assert_eq!(read(now).unwrap(), read(before).unwrap());
        assert_eq!(serde_json::to_string(&StrategyWire::from(read(before).unwrap())).unwrap(), now);
    }

    #[test]
    fn what_is_wrong_is_told_when_it_is_read_and_not_before() {
        let passed: StrategyWire =
            serde_json::from_str(r#"{"compressor":"none","cr":1,"collective":"dense-tree"}"#).unwrap();
        assert_eq!(passed.0, "none/dense-tree");
        let error = read(r#""topk(k=2.5)/allgather""#).unwrap_err().to_string();
        assert!(error.contains("k of topk") && error.contains("2.5"), "{error}");
        let error = read(r#"{"compressor":"zebra","cr":1,"collective":"allgather"}"#).unwrap_err().to_string();
        assert!(error.contains("zebra"), "{error}");
        assert!(serde_json::from_str::<StrategyWire>("7").is_err());
    }
}
