//! The codec of a specification.

use crate::codec::{Codec, Shape};
use crate::entry::Entry;
use crate::methods;
use flexcomm_domain::spec::CompressorSpec;

/// Builds a compressor.
pub trait Build {
    /// The compressor's line in the registry.
    fn entry(&self) -> &'static Entry;

    /// A codec for one tensor.
    fn codec(&self, shape: Shape) -> Box<dyn Codec>;
}

impl Build for CompressorSpec {
    fn entry(&self) -> &'static Entry {
        methods::all()
            .find(|entry| entry.info == self.compressor())
            .expect("a test holds the registry to the table of names")
    }

    fn codec(&self, shape: Shape) -> Box<dyn Codec> {
        let mut codec = (self.entry().build)(self.values(), shape);
        codec.send_values_as(self.value_type());
        codec
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_domain::spec::{Nature, SpecError};

    #[test]
    fn what_leaves_values_out_drops_them_unless_a_memory_keeps_them() {
        let drops = |text: &str| text.parse::<CompressorSpec>().unwrap().drops();
        for text in
            ["topk(k=0.01)", "powersgd(rank=2)", "randomk(k=0.1)", "threelc", "sketched(k=0.01)", "gradiveq(d=2)"]
        {
            assert!(drops(text) && !drops(&format!("{text}+ef(vanilla)")), "{text}");
        }
        for text in ["fp16", "signsgd", "qsgd(s=4)", "randomk(k=0.1,scaled=true)", "atomo(budget=3)", "sketchml"] {
            assert!(!drops(text), "{text}");
        }
    }

    /// Of a gradient that error feedback does not accumulate, `variance` sends nothing: a training by it stands still.
    #[test]
    fn what_sends_nothing_without_memory_is_refused_for_a_training() {
        let trainable = |text: &str| text.parse::<CompressorSpec>().unwrap().trainable();
        assert_eq!(
            trainable("variance(alpha=2)+nonfinite(skip)").unwrap_err().to_string(),
            "train with variance(alpha=2)+nonfinite(skip) without error feedback: it sends what accumulates there, and \
             without it next to nothing; add a memory, as in variance(alpha=2)+nonfinite(skip)+ef(vanilla)"
        );
        for text in
            ["variance+ef(vanilla)", "variance+ef(dgc,mu=0.9)", "topk(k=0.01)", "signsgd", "randomk(k=0.1)+ef(vanilla)"]
        {
            assert!(trainable(text).is_ok(), "{text}");
        }
    }

    /// Of every compressor that is unbiased: what rounds is scaled, what leaves values out is refused. That what is scaled does not
    /// diverge: `pipeline/scale.rs`.
    #[test]
    fn what_is_unbiased_is_scaled_under_error_feedback_or_refused() {
        let mut refused = Vec::new();
        for spec in methods::examples().filter(|spec| matches!(spec.nature(), Nature::Unbiased(_))) {
            assert!(spec.trainable().is_ok(), "{spec}");
            let rounds = spec.compressor().class == flexcomm_domain::spec::Class::Quantization;
            for memory in ["vanilla", "efsign", "dgc,mu=0.9", "sgc,alpha=0.5"] {
                let with: CompressorSpec = format!("{spec}+ef({memory})").parse().unwrap();
                match with.trainable() {
                    Ok(with) => assert!(rounds && with.is_scaled(), "{with}"),
                    Err(error) => {
                        assert!(!rounds, "{with}");
                        assert_eq!(error, SpecError::Diverges { of: with.to_string() });
                        assert!(error.to_string().contains("leave out the memory"), "{error}");
                        refused.push(with.compressor().name);
                    }
                }
            }
        }
        assert!(["randomk", "adaptive", "atomo"].iter().all(|name| refused.contains(name)), "{refused:?}");
    }
}
