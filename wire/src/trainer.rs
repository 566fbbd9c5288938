//! Trainer and agent on one node: JSON lines over a Unix socket.

use flexcomm_domain::{CodecBytes, CodecCost, Family, IndexBytes, Invalid, JobId, NodeName};
use serde::{Deserialize, Serialize};

use crate::{AppliedReport, Hello, JobOrders, StepsReport, TrialReport};

/// A compressor a trainer has and what its messages weigh in a step: with k of n values (all, where it leaves none out) they
/// have `header_bytes + indices + k * value_bytes` bytes; AR-Topk broadcasts `header_bytes + indices` and reduces
/// `k * value_bytes`. The indices have `k * index_bytes` bytes, or what their coding needs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CodecInfo {
    /// Without its ratio: `topk(k=*)+ef(vanilla)`, `fp16`, `powersgd(rank=2)+ef(vanilla)`.
    pub compressor: String,
    /// Fixed part of a message.
    pub header_bytes: u64,
    /// Per kept value; with an `index_coding` the most that it needs, for readers that do not know it.
    pub index_bytes: f64,
    /// How indices are written: `least`, the least of the codings whose size n and k tell (`flexcomm_domain::spec::index_bytes`).
    /// Absent from older trainers, and where there are none: `index_bytes` each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index_coding: Option<String>,
    /// Per kept value.
    pub value_bytes: f64,
    /// Collectives in a step that together move these bytes, one after the other.
    #[serde(default = "one")]
    pub rounds: u32,
    /// Measured on this trainer's device; absent where nothing was measured, and from older trainers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub times: Option<CodecTimes>,
    /// Whether it is a candidate only where the job's policy or the controller's settings name it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub on_request: bool,
}

/// What a codec takes on a device, in seconds: to compress, and to decompress one message.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CodecTimes {
    /// Per value of the gradient.
    pub compress_value_s: f64,
    /// Per kept value, on top.
    pub compress_kept_s: f64,
    /// Per value of the gradient.
    pub decompress_value_s: f64,
    /// Per kept value, on top.
    pub decompress_kept_s: f64,
}

impl From<[CodecCost; 2]> for CodecTimes {
    fn from([compress, decompress]: [CodecCost; 2]) -> Self {
        Self {
            compress_value_s: compress.value_s,
            compress_kept_s: compress.kept_s,
            decompress_value_s: decompress.value_s,
            decompress_kept_s: decompress.kept_s,
        }
    }
}

fn one() -> u32 {
    1
}

/// [`IndexBytes::Least`] in a [`CodecInfo`].
const LEAST: &str = "least";

impl CodecInfo {
    /// Of a family whose messages weigh this.
    pub fn new(family: Family, bytes: CodecBytes) -> Self {
        let (index_bytes, index_coding) = match bytes.indices {
            IndexBytes::Each(bytes) => (bytes, None),
            IndexBytes::Least => (4.0, Some(LEAST.to_owned())),
        };
        let CodecBytes { header_bytes, value_bytes, rounds, .. } = bytes;
        Self {
            compressor: family.to_string(),
            header_bytes,
            index_bytes,
            index_coding,
            value_bytes,
            rounds,
            times: None,
            on_request: false,
        }
    }

    /// What compressing and decompressing takes, if it was measured. Refuses what no device takes.
    pub fn costs(&self) -> Result<Option<[CodecCost; 2]>, Invalid> {
        let Some(times) = self.times else { return Ok(None) };
        let compress = CodecCost::new(times.compress_value_s, times.compress_kept_s)?;
        Ok(Some([compress, CodecCost::new(times.decompress_value_s, times.decompress_kept_s)?]))
    }
}

impl TryFrom<&CodecInfo> for CodecBytes {
    type Error = Invalid;

    fn try_from(info: &CodecInfo) -> Result<Self, Invalid> {
        let indices = match info.index_coding.as_deref() {
            None => IndexBytes::Each(info.index_bytes),
            Some(LEAST) => IndexBytes::Least,
            Some(other) => {
                let value = other.chars().take(80).collect();
                return Err(Invalid::Text {
                    what: "codec's index coding",
                    value,
                    allowed: "least, or none at all".into(),
                });
            }
        };
        CodecBytes::new(info.header_bytes, indices, info.value_bytes)?.in_rounds(info.rounds)
    }
}

/// Trainer to agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum FromTrainer {
    /// First line.
    Hello {
        /// Must equal [`crate::PROTOCOL`].
        protocol: u32,
        /// Who it is.
        #[serde(flatten)]
        hello: Hello,
    },
    /// The buckets of a rank that did not know them at its hello, or has others by now. Only to an agent that
    /// [takes it](ToTrainer::Welcome::takes_buckets).
    Buckets {
        /// Which job.
        job: JobId,
        /// This trainer's rank.
        rank: u32,
        /// As [`Hello::buckets`].
        values: Vec<u64>,
    },
    /// Step telemetry.
    Steps(StepsReport),
    /// A decision is in force.
    Applied(AppliedReport),
    /// A trial ended.
    Trial(TrialReport),
    /// The trainer ends in an orderly way.
    Bye,
    /// Of a trainer of another build: it is left out.
    #[serde(other)]
    Unknown,
}

/// Agent to trainer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum ToTrainer {
    /// Answer to a valid hello.
    Welcome {
        /// The agent's protocol.
        protocol: u32,
        /// The node's name.
        node: NodeName,
        /// Whether the agent takes [`FromTrainer::Buckets`]: older ones close the connection on a message that they do not know.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        takes_buckets: bool,
    },
    /// What the job should do now, whole: behind the welcome, and whenever it changes.
    Orders(JobOrders),
    /// Answer to anything else, or to a run that the controller refuses, then also after the welcome; the connection
    /// closes after it.
    Refused {
        /// What was wrong with which value.
        reason: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stand-ins for agents in other languages write it by hand.
    #[test]
    fn orders_are_one_object_with_their_kind() {
        let job = JobId::new("j").unwrap();
        let orders = ToTrainer::Orders(JobOrders { job, decision: None, trial: None });
        let text = r#"{"kind":"orders","job":"j"}"#;
        assert_eq!(
            (serde_json::to_string(&orders).unwrap().as_str(), serde_json::from_str(text).unwrap()),
            (text, orders)
        );
    }

    /// Buckets go only to agents that say in their welcome that they take them.
    #[test]
    fn buckets_come_back_and_older_agents_do_not_take_them() {
        let buckets = FromTrainer::Buckets { job: JobId::new("j").unwrap(), rank: 1, values: vec![3, 5] };
        let text = r#"{"kind":"buckets","job":"j","rank":1,"values":[3,5]}"#;
        assert_eq!(serde_json::to_string(&buckets).unwrap(), text);
        assert_eq!(serde_json::from_str::<FromTrainer>(text).unwrap(), buckets);
        let welcome =
            |takes_buckets| ToTrainer::Welcome { protocol: 3, node: NodeName::new("n").unwrap(), takes_buckets };
        let older = r#"{"kind":"welcome","protocol":3,"node":"n"}"#;
        assert_eq!(serde_json::to_string(&welcome(false)).unwrap(), older);
        for (text, welcome) in
            [(older, welcome(false)), (&older.replace('}', r#","takes_buckets":true}"#), welcome(true))]
        {
            assert_eq!(serde_json::from_str::<ToTrainer>(text).unwrap(), welcome);
        }
    }

    /// What a trainer of a release without policies says, and what one that sets none says now.
    #[test]
    fn a_hello_without_a_policy_is_as_it_was() {
        let text = r#"{"kind":"hello","protocol":3,"job":"j","rank":0,"world":2,"gradient_values":10,"backend":"x","codecs":[],"collectives":[]}"#;
        let FromTrainer::Hello { protocol, hello } = serde_json::from_str(text).unwrap() else { panic!("no hello") };
        assert_eq!((protocol, &hello.policy), (3, &None));
        assert_eq!(serde_json::to_string(&FromTrainer::Hello { protocol, hello }).unwrap(), text);
        let with = text.replace(r#""backend""#, r#""policy":{"later":1,"observe":true},"backend""#);
        let hello: FromTrainer = serde_json::from_str(&with).unwrap();
        assert_eq!(serde_json::to_string(&hello).unwrap(), with, "with keys that this release does not know");
    }

    #[test]
    fn codecs_of_older_trainers_are_linear() {
        let text = r#"{"compressor":"topk","header_bytes":16,"index_bytes":4.0,"value_bytes":4.0}"#;
        let info: CodecInfo = serde_json::from_str(text).unwrap();
        let bytes = CodecBytes::try_from(&info).unwrap();
        assert_eq!(bytes, CodecBytes { header_bytes: 16, ..CodecBytes::PAPER });
        assert_eq!(bytes.pairs(1_000_000, 1000), 16.0 + 8000.0);
        assert_eq!(info.costs(), Ok(None));
        let json = serde_json::to_string(&info).unwrap();
        assert!(!json.contains("index_coding") && !json.contains("times"));
    }

    #[test]
    fn codecs_come_back() {
        let family: Family = "topk".parse().unwrap();
        let least = CodecBytes::new(44, IndexBytes::Least, 2.0).unwrap();
        for bytes in [least, CodecBytes::PAPER, CodecBytes::DENSE.in_rounds(2).unwrap()] {
            let text = serde_json::to_string(&CodecInfo::new(family, bytes)).unwrap();
            let info: CodecInfo = serde_json::from_str(&text).unwrap();
            assert_eq!((CodecBytes::try_from(&info), info.compressor.parse()), (Ok(bytes), Ok(family)), "{text}");
        }
    }

    #[test]
    fn measured_times_come_back() {
        let costs = [(1e-9, 2e-9), (0.0, 3.5e-11)].map(|(value_s, kept_s)| CodecCost { value_s, kept_s });
        let info = CodecInfo { times: Some(costs.into()), ..CodecInfo::new(Family::NONE, CodecBytes::DENSE) };
        let text = serde_json::to_string(&info).unwrap();
        assert!(text.contains(r#""times":{"compress_value_s":1e-9,"compress_kept_s":2e-9,"decompress_value_s":0.0,"#));
        assert_eq!(serde_json::from_str::<CodecInfo>(&text).unwrap().costs(), Ok(Some(costs)));
    }

    #[test]
    fn what_no_codec_takes_is_refused_by_name() {
        let costs = [CodecCost { value_s: 1e-9, kept_s: 1e-9 }; 2];
        let refused = |change: fn(&mut CodecTimes), words: &str| {
            let mut times = costs.into();
            change(&mut times);
            let info = CodecInfo { times: Some(times), ..CodecInfo::new(Family::NONE, CodecBytes::DENSE) };
            let error = info.costs().unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        refused(|times| times.compress_value_s = 1.0, "time per value is 1, allowed is 0 to 0.001 s");
        refused(|times| times.compress_kept_s = f64::NAN, "time per kept value is NaN");
        refused(|times| times.decompress_value_s = f64::INFINITY, "time per value is inf");
        refused(|times| times.decompress_kept_s = -1.0, "time per kept value is -1");
    }

    #[test]
    fn what_no_codec_weighs_is_refused_by_name() {
        let refused = |change: fn(&mut CodecInfo), words: &str| {
            let mut info = CodecInfo::new(Family::NONE, CodecBytes::DENSE);
            change(&mut info);
            let error = CodecBytes::try_from(&info).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        refused(|info| info.index_coding = Some("rice".into()), "index coding \"rice\"");
        refused(|info| info.index_bytes = -1.0, "index bytes per value is -1");
        refused(|info| info.value_bytes = 1e9, "value bytes per value is 1000000000");
        refused(|info| info.rounds = 0, "number of rounds is 0");
    }
}
