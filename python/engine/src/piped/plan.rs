//! Which kernels do what a strategy's text says, layer by layer; or why the host must do it.

use crate::bucket::OnHost;
use flexcomm_compression::Layers;
use flexcomm_compression::codec::{Scope, Shape};
use flexcomm_compression::pipeline::Member;
use flexcomm_domain::spec::CompressorSpec;
use flexcomm_gpu_kernels::bucket::Method;
use flexcomm_gpu_kernels::hybrid::Qsparse;
use flexcomm_gpu_kernels::{Norm, Quantizer, Random, RandomK, Threshold};

/// How a message's payload is added up on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Decoding {
    /// By the method's own kernel, from the payload as it is.
    Payload,
    /// k, indices and values, which the host reads.
    Lists,
    /// k values at indices that all ranks drew.
    Drawn,
    /// Signs that ranks vote with.
    Vote,
    /// By the host.
    Host,
}

/// A text's kernels for a bucket.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    strategy: CompressorSpec,
    member: Member,
    /// Of each layer that is compressed by itself.
    shapes: Vec<Shape>,
    pub(super) keeps: bool,
    pub(super) decoding: Decoding,
}

fn shapes(strategy: &CompressorSpec, layers: &Layers) -> Vec<Shape> {
    match strategy.scope() {
        Scope::Tensor => layers.shapes().collect(),
        // One layer alone keeps its shape, as in the pipeline.
        Scope::Bucket => {
            let n = layers.values();
            vec![layers.shapes().find(|shape| shape.values() == n).unwrap_or(Shape::vector(n))]
        }
    }
}

/// What stands behind the compressor's name, of which kernels know the plain memory, scopes and seeds.
fn keeps(text: &str) -> Option<bool> {
    let known = |part: &&str| part.starts_with("scope(") || part.starts_with("seed(");
    let rest: Vec<&str> = text.split('+').skip(1).filter(|part| !known(part)).collect();
    match rest[..] {
        [] => Some(false),
        ["ef(vanilla)"] => Some(true),
        _ => None,
    }
}

impl Plan {
    pub(super) fn new(strategy: &CompressorSpec, layers: &Layers, member: Member) -> Result<Self, OnHost> {
        let text = strategy.to_string();
        let none = || OnHost::Text(text.clone());
        let shapes = shapes(strategy, layers);
        let mut plan = Self {
            strategy: *strategy,
            member,
            shapes,
            keeps: keeps(&text).ok_or_else(none)?,
            decoding: Decoding::Host,
        };
        plan.methods(0).ok_or_else(none)?;
        plan.decoding = plan.decoding().ok_or_else(none)?;
        Ok(plan)
    }

    /// Values of each layer.
    pub(super) fn lengths(&self) -> Vec<u64> {
        self.shapes.iter().map(|shape| shape.values() as u64).collect()
    }

    /// Of every layer, with the random numbers of a step.
    pub(super) fn methods(&self, step: u64) -> Option<Vec<Method>> {
        let seed = self.strategy.seed().unwrap_or(self.member.seed);
        let (tensor, rank) = (self.member.tensor, Some(self.member.rank));
        let of = |(i, shape): (u32, &Shape)| {
            self.method(*shape, Random { seed, step, tensor: tensor.wrapping_add(i), rank })
        };
        (0..).zip(&self.shapes).map(of).collect()
    }

    fn method(&self, shape: Shape, random: Random) -> Option<Method> {
        let (values, n) = (self.strategy.values(), shape.values());
        let (shared, k) = (Random { rank: None, ..random }, || values.kept(0, n) as u64);
        Some(match self.strategy.compressor().name {
            "topk" | "lwtopk" => Method::TopK(k()),
            "mstopk" => Method::Threshold(Threshold::MsTopK { k: k(), random }),
            "dgc" | "sgc" => {
                let (sample, most) = (values.number(1), values.number(2));
                Method::Threshold(Threshold::Dgc { k: k(), sample, most, random })
            }
            "threshold" => Method::Threshold(Threshold::Above { v: values.number(0) as f32 }),
            "hardthreshold" => Method::HardThreshold(values.number(0) as f32),
            "randomk" => {
                let random = if values.is_on(2) { shared } else { random };
                Method::RandomK(RandomK { k: k(), scaled: values.is_on(1), random })
            }
            "qsparse" => {
                let (s, scaled) = (values.whole(3) as u32, values.is_on(4));
                let how = if values.whole(2) == 1 { Qsparse::Signs } else { Qsparse::Levels { s, scaled, random } };
                if values.whole(1) == 1 { Method::QsparseRandom(k(), how, shared) } else { Method::Qsparse(k(), how) }
            }
            "threelc" => Method::ThreeLc(values.number(0)),
            _ => Method::Quantize(self.quantizer(shape)?, random),
        })
    }

    fn quantizer(&self, shape: Shape) -> Option<Quantizer> {
        let values = self.strategy.values();
        let norm = |is_max: bool| if is_max { Norm::Max } else { Norm::L2 };
        let world = self.member.world;
        Some(match self.strategy.compressor().name {
            "signsgd" => Quantizer::Signs,
            "efsignsgd" => Quantizer::ScaledSigns,
            "onebit" if values.is_on(0) => Quantizer::ScaledSigns,
            "onebit" => Quantizer::Signs,
            "ssdm" => Quantizer::Ssdm,
            "qsgd" if values.whole(3) == 0 => {
                let (s, bucket) = (values.whole(0) as u32, values.whole(1) as u32);
                Quantizer::Qsgd { s, bucket, norm: norm(values.whole(2) == 1) }
            }
            "dithering" => {
                let (k, natural) = (values.whole(0) as u32, values.whole(1) == 1);
                Quantizer::Dithering { k, natural, norm: norm(values.whole(2) == 0) }
            }
            "terngrad" => Quantizer::TernGrad { clip: values.number(0) },
            "lpcsvrg" => Quantizer::LpcSvrg { bits: values.whole(0) as u32, lambda: values.number(1) },
            "onebitsgd" => {
                let columns = if values.whole(1) == 1 { shape.cols.max(1) as u32 } else { 1 };
                Quantizer::OneBitSgd { threshold: values.number(0) as f32, columns }
            }
            "minmax8" => Quantizer::MinMax8,
            "inceptionn" => Quantizer::Inceptionn { bound: values.whole(0) as u32 },
            "natural" => Quantizer::Natural,
            "eightbit" => Quantizer::EightBit { fixed: values.whole(0) == 1 },
            "fp16" => Quantizer::F16 { world },
            "bf16" => Quantizer::Bf16 { world },
            _ => return None,
        })
    }

    fn decoding(&self) -> Option<Decoding> {
        let one = self.shapes.len() == 1;
        Some(match self.strategy.compressor().name {
            "topk" | "lwtopk" | "mstopk" | "dgc" | "sgc" | "threshold" => Decoding::Lists,
            "randomk" if !self.strategy.values().is_on(2) => Decoding::Lists,
            "randomk" if one => Decoding::Drawn,
            // The sum of several layers has no lists of its own, and the host none of the device's draws.
            "randomk" => return None,
            "signsgd" if one => Decoding::Vote,
            // Where one payload ends and the next begins, only reading them tells.
            "threelc" | "inceptionn" if !one => Decoding::Host,
            "hardthreshold" | "qsparse" | "signsgd" => Decoding::Host,
            _ => Decoding::Payload,
        })
    }
}
