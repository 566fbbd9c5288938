//! Which kernels do what a compressor spec says, layer by layer; or why the host must do it.

use super::OnHost;
use flexcomm_compression::codec::{Scope, Shape, Size, Travels};
use flexcomm_compression::pipeline::Member;
use flexcomm_compression::{Build, Layers};
use flexcomm_domain::spec::{Checksum, CompressorSpec, MemoryKind, NonFinite, ValueType};
use flexcomm_gpu_kernels::bucket::Method;
use flexcomm_gpu_kernels::hybrid::Qsparse;
use flexcomm_gpu_kernels::{Norm, Quantizer, Random, RandomK, Threshold};

/// How a message's payload is added up on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Decoding {
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

/// A spec's kernels for a bucket.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    strategy: CompressorSpec,
    member: Member,
    /// Of each layer that is compressed by itself.
    shapes: Vec<Shape>,
    pub(crate) keeps: bool,
    pub(crate) decoding: Decoding,
    /// Whether the host's messages have one size, whatever the values are. Where they have not, as of quantizers whose codes the
    /// host writes in whichever coding is the least, ranks gather sizes first, kernels' packed codes or not.
    one_size: bool,
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

/// Whether there is a memory. None where a part has no kernels: they know the plain memory, scopes and seeds.
fn keeps(spec: &CompressorSpec) -> Option<bool> {
    let as_it_is = spec.value_type() == ValueType::F32 && spec.checksum() == Checksum::None;
    if !as_it_is || spec.momentum().is_some() || spec.non_finite() != NonFinite::Refuse {
        return None;
    }
    match spec.memory() {
        None => Some(false),
        // beta and gamma.
        Some((MemoryKind::Vanilla, values)) if values.all() == [1.0, 1.0] => Some(true),
        Some(_) => None,
    }
}

impl Plan {
    pub(crate) fn new(strategy: &CompressorSpec, layers: &Layers, member: Member) -> Result<Self, OnHost> {
        let text = strategy.to_string();
        let none = || OnHost::Parts(text.clone());
        let shapes = shapes(strategy, layers);
        let mut plan = Self {
            strategy: *strategy,
            member,
            shapes,
            keeps: keeps(strategy).ok_or_else(none)?,
            decoding: Decoding::Host,
            one_size: false,
        };
        plan.one_size = plan.shapes.iter().all(|shape| matches!(strategy.codec(*shape).size(), Size::Exact(_)));
        plan.methods(0).ok_or_else(none)?;
        plan.decoding = plan.decoding().ok_or_else(none)?;
        Ok(plan)
    }

    /// Values of each layer.
    pub(crate) fn lengths(&self) -> Vec<u64> {
        self.shapes.iter().map(|shape| shape.values() as u64).collect()
    }

    /// Bytes of the one payload that can be gathered and added up without the host: where its length is known without a look at
    /// the values, and kernels read it as it arrives.
    pub(crate) fn staying(&self, methods: &[Method]) -> Option<u64> {
        let [method] = methods else { return None };
        let read = match self.decoding {
            Decoding::Lists => method.selected().is_some(),
            Decoding::Payload => matches!(method, Method::Quantize(..)),
            Decoding::Drawn | Decoding::Vote | Decoding::Host => false,
        };
        let gathered = self.one_size && self.strategy.travels() == Travels::Gathers;
        method.sent_bytes(self.shapes[0].values() as u64).filter(|_| read && gathered)
    }

    /// Of every layer, with the random numbers of a step.
    pub(crate) fn methods(&self, step: u64) -> Option<Vec<Method>> {
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
            // Kernels write packed codes alone, which the host reads where the least coding is in force, too.
            "qsgd" if matches!(values.whole(3), 0 | 3) => {
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
