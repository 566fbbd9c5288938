//! Which kernels do what a compressor spec says, layer by layer.

use super::Method;
use crate::hybrid::Qsparse;
use crate::{Norm, Outcome, Quantizer, Random, RandomK, Threshold};
use flexcomm_compression::codec::{Scope, Shape, Size, Travels};
use flexcomm_compression::pipeline::Member;
use flexcomm_compression::{Build, Energy, Layers};
use flexcomm_domain::spec::{
    Checksum, Class, CompressorInfo, CompressorSpec, MemoryKind, NonFinite, ValueType, Values, compressors as c,
};

/// How a message's payload is added up on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decoding {
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
pub struct Plan {
    strategy: CompressorSpec,
    member: Member,
    /// Of each layer that is compressed by itself.
    shapes: Vec<Shape>,
    /// Whether there is a memory.
    pub keeps: bool,
    /// How messages are added up.
    pub decoding: Decoding,
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
    /// None where some part of the spec has no kernels, or none that fit together.
    pub fn new(strategy: &CompressorSpec, layers: &Layers, member: Member) -> Option<Self> {
        let shapes = shapes(strategy, layers);
        let mut plan = Self {
            strategy: *strategy,
            member,
            shapes,
            keeps: keeps(strategy)?,
            decoding: Decoding::Host,
            one_size: false,
        };
        plan.one_size = plan.shapes.iter().all(|shape| matches!(strategy.codec(*shape).size(), Size::Exact(_)));
        let methods = plan.methods(0)?;
        if let Some(method) = methods.first() {
            plan.decoding = plan.decoding(*method)?;
        }
        Some(plan)
    }

    /// The energy of a step's layers as it counts, see [`flexcomm_compression::pipeline::Pipeline::counted`].
    pub fn energy<'a>(&self, outcomes: impl IntoIterator<Item = &'a Outcome>) -> Energy {
        let copies = self.strategy.compressor().class == Class::Sparsification;
        let (mut energy, mut residual) = (Energy::default(), 0.0);
        for outcome in outcomes {
            (energy, residual) = (energy + outcome.energy(), residual + outcome.residual);
        }
        match self.keeps && !copies {
            true => Energy { sent: (energy.compensated - residual).max(0.0), ..energy },
            false => energy,
        }
    }

    /// Values of each layer.
    pub fn lengths(&self) -> Vec<u64> {
        self.shapes.iter().map(|shape| shape.values() as u64).collect()
    }

    /// Bytes of the one payload that can be gathered and added up without the host: where its length is known without a look at
    /// the values, and kernels read it as it arrives.
    pub fn staying(&self, methods: &[Method]) -> Option<u64> {
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
    pub fn methods(&self, step: u64) -> Option<Vec<Method>> {
        let seed = self.strategy.seed().unwrap_or(self.member.seed);
        let (tensor, rank) = (self.member.tensor, Some(self.member.rank));
        let of = |(i, shape): (u32, &Shape)| {
            self.method(*shape, Random { seed, step, tensor: tensor.wrapping_add(i), rank })
        };
        (0..).zip(&self.shapes).map(of).collect()
    }

    fn method(&self, shape: Shape, random: Random) -> Option<Method> {
        let layer = Layer { values: self.strategy.values(), shape, random, world: self.member.world };
        let (_, of) = KERNELS.iter().find(|(info, _)| std::ptr::eq(*info, self.strategy.compressor()))?;
        of(&layer)
    }

    fn decoding(&self, method: Method) -> Option<Decoding> {
        let (one, votes) = (self.shapes.len() == 1, std::ptr::eq(self.strategy.compressor(), &c::SIGNSGD));
        Some(match method {
            Method::RandomK(how) if how.is_shared() && one => Decoding::Drawn,
            // The sum of several layers has no lists of its own, and the host none of the device's draws.
            Method::RandomK(how) if how.is_shared() => return None,
            Method::TopK(_) | Method::Threshold(_) | Method::RandomK(_) => Decoding::Lists,
            Method::Quantize(..) if votes && one => Decoding::Vote,
            Method::Quantize(..) if votes => Decoding::Host,
            // Where one payload ends and the next begins, only reading them tells.
            Method::ThreeLc(_) | Method::Quantize(Quantizer::Inceptionn { .. }, _) if !one => Decoding::Host,
            Method::HardThreshold(_) | Method::Qsparse(..) | Method::QsparseRandom(..) => Decoding::Host,
            Method::ThreeLc(_) | Method::Quantize(..) => Decoding::Payload,
        })
    }
}

/// What a compressor gets to compress by itself.
struct Layer<'a> {
    values: &'a Values,
    shape: Shape,
    random: Random,
    world: u32,
}

impl Layer<'_> {
    /// By the ratio or number that is the first parameter.
    fn k(&self) -> u64 {
        self.values.kept(0, self.shape.values()) as u64
    }

    fn number_f32(&self, at: usize) -> f32 {
        self.values.number(at) as f32
    }

    fn whole(&self, at: usize) -> u32 {
        self.values.whole(at) as u32
    }

    /// What the choice at a place names; the largest magnitude is its choice number `max`.
    fn norm(&self, at: usize, max: u32) -> Norm {
        if self.whole(at) == max { Norm::Max } else { Norm::L2 }
    }

    /// As all ranks draw.
    fn shared(&self) -> Random {
        Random { rank: None, ..self.random }
    }

    fn quantize(&self, quantizer: Quantizer) -> Option<Method> {
        Some(Method::Quantize(quantizer, self.random))
    }
}

/// Kernels of a layer; none for parameters that have none.
type OfLayer = fn(&Layer<'_>) -> Option<Method>;

/// The compressors that have kernels.
static KERNELS: &[(&CompressorInfo, OfLayer)] = &[
    (&c::TOPK, |l| Some(Method::TopK(l.k()))),
    (&c::LWTOPK, |l| Some(Method::TopK(l.k()))),
    (&c::MSTOPK, |l| Some(Method::Threshold(Threshold::MsTopK { k: l.k(), random: l.random }))),
    (&c::DGC, dgc),
    (&c::SGC, dgc),
    (&c::THRESHOLD, |l| Some(Method::Threshold(Threshold::Above { v: l.number_f32(0) }))),
    (&c::HARDTHRESHOLD, |l| Some(Method::HardThreshold(l.number_f32(0)))),
    (&c::RANDOMK, |l| {
        let random = if l.values.is_on(2) { l.shared() } else { l.random };
        Some(Method::RandomK(RandomK { k: l.k(), scaled: l.values.is_on(1), random }))
    }),
    (&c::QSPARSE, qsparse),
    (&c::THREELC, |l| Some(Method::ThreeLc(l.values.number(0)))),
    (&c::SIGNSGD, |l| l.quantize(Quantizer::Signs)),
    (&c::EFSIGNSGD, |l| l.quantize(Quantizer::ScaledSigns)),
    (&c::ONEBIT, |l| l.quantize(if l.values.is_on(0) { Quantizer::ScaledSigns } else { Quantizer::Signs })),
    (&c::SSDM, |l| l.quantize(Quantizer::Ssdm)),
    (&c::QSGD, |l| {
        let quantizer = Quantizer::Qsgd { s: l.whole(0), bucket: l.whole(1), norm: l.norm(2, 1) };
        // Kernels write packed codes alone, which the host reads where the least coding is in force, too.
        if matches!(l.whole(3), 0 | 3) { l.quantize(quantizer) } else { None }
    }),
    (&c::DITHERING, |l| {
        l.quantize(Quantizer::Dithering { k: l.whole(0), natural: l.whole(1) == 1, norm: l.norm(2, 0) })
    }),
    (&c::TERNGRAD, |l| l.quantize(Quantizer::TernGrad { clip: l.values.number(0) })),
    (&c::LPCSVRG, |l| l.quantize(Quantizer::LpcSvrg { bits: l.whole(0), lambda: l.values.number(1) })),
    (&c::ONEBITSGD, |l| {
        let columns = if l.whole(1) == 1 { l.shape.cols.max(1) as u32 } else { 1 };
        l.quantize(Quantizer::OneBitSgd { threshold: l.number_f32(0), columns })
    }),
    (&c::MINMAX8, |l| l.quantize(Quantizer::MinMax8)),
    (&c::INCEPTIONN, |l| l.quantize(Quantizer::Inceptionn { bound: l.whole(0) })),
    (&c::NATURAL, |l| l.quantize(Quantizer::Natural)),
    (&c::EIGHTBIT, |l| l.quantize(Quantizer::EightBit { fixed: l.whole(0) == 1 })),
    (&c::FP16, |l| l.quantize(Quantizer::F16 { world: l.world })),
    (&c::BF16, |l| l.quantize(Quantizer::Bf16 { world: l.world })),
];

fn dgc(l: &Layer<'_>) -> Option<Method> {
    let (sample, most) = (l.values.number(1), l.values.number(2));
    Some(Method::Threshold(Threshold::Dgc { k: l.k(), sample, most, random: l.random }))
}

fn qsparse(l: &Layer<'_>) -> Option<Method> {
    let (s, scaled, random) = (l.whole(3), l.values.is_on(4), l.random);
    let how = if l.whole(2) == 1 { Qsparse::Signs } else { Qsparse::Levels { s, scaled, random } };
    Some(match l.whole(1) {
        1 => Method::QsparseRandom(how, RandomK { k: l.k(), scaled: false, random: l.shared() }),
        _ => Method::Qsparse(l.k(), how),
    })
}
