//! A bucket whose gradient lies on a GPU: its residual lies there too, kernels compress there and add messages up there. The
//! bytes are those of the host's pipeline, so each rank may choose for itself, in every step, where it works.
//!
//! Where a message has one payload of a size that all know, it stays on the device ([`Bucket::stays`]) and nothing waits:
//! [`Bucket::write_on`] leaves it in the block that is gathered, before anybody knows whether the gradient is finite (a kernel
//! corrects the header), [`Bucket::add_on`] adds all ranks' up, and [`Bucket::judge`] says later what that was. All
//! other messages cross to the host, which waits for the kernels once per bucket.

use super::{Bucket, Host, LastRound, Phase, Place, Ran, Run};
use crate::auto::Leader;
use crate::error::ExchangeError;
use crate::head::{NOT_FINITE, STATUS_AT};
use flexcomm_compression::codec::EncodeError;
use flexcomm_compression::memory::{Residual, Units};
use flexcomm_compression::pipeline::{Pipeline, Step, factor};
use flexcomm_compression::wire::{Reader, Writer, read_indices, write_message};
use flexcomm_compression::{Energy, Layers as CpuLayers};
use flexcomm_gpu_kernels::bucket::{Decoding, Gradient, Layers, Method, Plan};
use flexcomm_gpu_kernels::{
    Copies, LaunchError, ListRoom, Lists, OUTCOME_BYTES, Outcome, Quantizer, Selection, Span, Target,
};
use flexcomm_gpu_kernels::{add, add_lists, add_mean, lists_room, majority, scatter};

const ALIGN: u64 = 256;

/// Of the word behind an outcome that says whether the payloads could be read.
const REFUSED_BYTES: u64 = 4;

/// Why a bucket that lies on a device is compressed on the host.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum NotOnDevice {
    /// AR-Topk of another selection than top-k of one tensor.
    #[error(
        "AR-Topk of {0} is exchanged through the host: kernels choose a leader's indices by top-k of one tensor alone"
    )]
    Selection(String),
    /// Parts that have no kernels that fit together.
    #[error("{0} has no kernels yet for all of its parts")]
    Parts(String),
    /// Its device buffer was not given yet.
    #[error("it has no memory on the device")]
    Absent,
    /// An unbiased compressor's message has to be scaled.
    #[error(
        "the variance that its compressor adds has grown so large that its messages are scaled, which no kernel does"
    )]
    Variance,
    /// The driver refused, or the memory is none that kernels can use.
    #[error("failed to {0}")]
    Launch(#[from] LaunchError),
}

/// Memory of a device that somebody gave to a bucket and keeps allocated while this lives.
pub trait DeviceBuffer: std::fmt::Debug + Send {
    /// All of it.
    fn span(&self) -> Span;

    /// Copies to the host, after all that was launched.
    fn fetch(&self, from: Span, to: &mut [u8]) -> Result<(), LaunchError>;
}

/// What all ranks have sent about a bucket that stays on the device, copied from there when the collective was over.
#[derive(Debug, Clone, Copy)]
pub struct Answers<'a> {
    /// Whether the header of some rank's part says that it has none.
    pub refused: bool,
    /// Of every rank's message, in rank order.
    pub headers: &'a [&'a [u8]],
    /// [`Bucket::outcome_on`] of this rank, copied after [`Bucket::add_on`].
    pub outcome: &'a [u8],
}

/// A step that has left its residual on the device.
#[derive(Debug, Clone, Copy)]
struct Done {
    learning_rate: f64,
    /// None before the first.
    step: Option<u64>,
}

/// Where it lies and what it is made of.
#[derive(Debug)]
pub(super) struct OnDevice {
    layers: Layers,
    /// For what arrives.
    room: Span,
    plan: Plan,
    buffer: Box<dyn DeviceBuffer>,
    /// The last step that was done, and the one before.
    done: [Done; 2],
    /// Whether a step was done that may yet be put back.
    under_way: bool,
    methods: Vec<Method>,
    /// Of AR-Topk: this rank's selection.
    selected: Vec<u32>,
    /// Header of the message under way, where that stays on the device.
    header: Option<Vec<u8>>,
}

/// Bytes for one rank's payload or lists of a layer, for all ranks' votes, or for counts of lists that stay on the device.
fn room_bytes(plan: &Plan, methods: &[Method], world: u32) -> u64 {
    let each = plan.lengths().into_iter().zip(methods).map(|(n, method)| method.payload_bytes(n)).max().unwrap_or(0);
    let each = (each + 16).next_multiple_of(ALIGN);
    let counts = match (methods, plan.staying(methods)) {
        ([method], Some(_)) => method.selected().map_or(0, |k| lists_room(plan.lengths()[0], k, world)),
        _ => 0,
    };
    if plan.decoding == Decoding::Vote { each * u64::from(world) } else { each.max(counts.next_multiple_of(ALIGN)) }
}

/// A message's header, in front of a payload of so many bytes.
fn framed(pipeline: &Pipeline, step: Step, payload: u64) -> Result<Vec<u8>, EncodeError> {
    let mut message = Writer::new();
    write_message(&pipeline.message_header(step), &mut message, |out| {
        out.room(payload as usize);
        Ok(())
    })?;
    let mut header = message.into_vec();
    header.truncate(header.len() - payload as usize);
    Ok(header)
}

/// The payload of a last round's message whose factors, where it has any, are 1.
fn unscaled_payload<'m>(pipeline: &Pipeline, message: &'m [u8], step: Step) -> Option<&'m [u8]> {
    let payload = pipeline.open_message(message, step.index, pipeline.rounds() - 1).ok()?;
    let (factors, payload) = payload.split_at_checked(pipeline.factor_bytes())?;
    factors.as_chunks::<4>().0.iter().all(|factor| *factor == 1f32.to_le_bytes()).then_some(payload)
}

fn f32s(bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes))
}

/// Uploads floats or indices, each as its bytes.
fn upload_words(device: &impl Copies, to: Span, words: impl Iterator<Item = [u8; 4]>) -> Result<(), LaunchError> {
    device.upload(to, words.flatten().collect::<Vec<u8>>().as_slice())
}

fn fetch_outcome(device: &impl Copies, from: Span) -> Result<Outcome, LaunchError> {
    let mut bytes = [0; OUTCOME_BYTES as usize];
    device.download(from.part(0, OUTCOME_BYTES), &mut bytes)?;
    Ok(Outcome::read(&bytes))
}

impl Bucket {
    fn plan(&self) -> Result<(Plan, Vec<Method>), NotOnDevice> {
        let pipeline = &self.run.pipeline;
        // Without a memory, an older strategy's residual goes out first.
        let plan = Plan::new(pipeline.spec(), pipeline.layers(), self.member)
            .filter(|plan| plan.keeps || !pipeline.has_residual())
            .ok_or_else(|| NotOnDevice::Parts(pipeline.spec().to_string()))?;
        let methods = plan.methods(0).unwrap_or_default();
        Ok((plan, methods))
    }

    /// Bytes of device memory that it needs, aligned to 256; or why kernels cannot do it.
    pub fn device_bytes(&self) -> Result<u64, NotOnDevice> {
        let (plan, methods) = self.plan()?;
        Ok(Layers::bytes(&plan.lengths(), &methods)? + room_bytes(&plan, &methods, self.member.world))
    }

    /// Whether its residual lies on a device.
    pub fn is_on_device(&self) -> bool {
        self.device.is_some()
    }

    /// Moves the residual to the device, into `buffer`.
    pub fn move_to_device(&mut self, device: &impl Copies, buffer: Box<dyn DeviceBuffer>) -> Result<(), NotOnDevice> {
        let ((plan, methods), memory) = (self.plan()?, buffer.span());
        let lengths = plan.lengths();
        let bytes = Layers::bytes(&lengths, &methods)?;
        let layers = Layers::new(device, &lengths, &methods, memory.part(0, bytes))?;
        let residual = self.residual();
        let mut rest = &residual[..];
        for (span, n) in layers.residual().zip(&lengths) {
            let (own, after) = rest.split_at((*n as usize).min(rest.len()));
            rest = after;
            if own.iter().any(|value| value.to_bits() != 0) {
                upload_words(device, span, own.iter().map(|value| value.to_le_bytes()))?;
            }
        }
        let room = memory.part(bytes, room_bytes(&plan, &methods, self.member.world));
        let pipeline = &self.run.pipeline;
        let done = [Done { learning_rate: pipeline.learning_rate(), step: pipeline.last_step() }; 2];
        let (selected, header) = Default::default();
        self.device = Some(OnDevice { layers, room, plan, buffer, done, under_way: false, methods, selected, header });
        Ok(())
    }

    /// Moves the residual to the host, for everything that no kernel does. Waits for the device.
    pub fn copy_to_host(&mut self) -> Result<(), ExchangeError> {
        self.abandon();
        let Some(own) = &mut self.device else { return Ok(()) };
        own.put_back();
        if own.plan.keeps {
            let mut values = Vec::with_capacity(self.run.pipeline.layers().values());
            for span in own.layers.residual() {
                let mut bytes = vec![0; span.bytes() as usize];
                own.buffer.fetch(span, &mut bytes)?;
                values.extend(f32s(&bytes));
            }
            let (spec, layers) = (*self.run.pipeline.spec(), self.run.pipeline.layers().clone());
            let units = match self.run.pipeline.rate_is_assumed() {
                true => Units::GRADIENTS,
                false => Units::at(own.done[0].learning_rate),
            };
            let residual = Residual { values: &values, units };
            let pipeline = Pipeline::with_residual(&spec, layers, self.member, residual)?;
            self.run.pipeline = pipeline.after_step(own.done[0].step);
        }
        self.device = None;
        Ok(())
    }

    fn compress_on(&mut self, device: &impl Copies, gradient: Gradient) -> Result<(), NotOnDevice> {
        let (step, pipeline) = (self.step, &self.run.pipeline);
        let Some(own) = &mut self.device else { return Err(NotOnDevice::Absent) };
        own.layers.step(device, gradient, own.plan.keeps, &own.methods)?;
        own.did_step(step);
        if let Some(payload) = own.plan.staying(&own.methods).filter(|_| pipeline.factor_bytes() == 0) {
            own.header =
                Some(framed(pipeline, step, payload).map_err(|_| NotOnDevice::Parts(pipeline.spec().to_string()))?);
            return Ok(());
        }
        match own.fetch(device, pipeline, step, &mut self.message) {
            Ok(Some(energy)) => self.energy = energy,
            Ok(None) => {
                own.put_back();
                self.excuse(&EncodeError::NonFinite { index: 0, value: f32::NAN });
            }
            Err(error) => {
                own.put_back();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Bytes of a message that would stay on the device, and of its header; none where none does.
    pub fn staying(&self) -> Option<(usize, usize)> {
        let (own, pipeline) = (self.device.as_ref()?, &self.run.pipeline);
        let stays = own.plan.staying(&own.methods).is_some() && pipeline.factor_bytes() == 0;
        stays.then(|| (pipeline.size().most(), self.sum_header()))
    }

    /// Whether the message under way stays on the device: then [`Self::write_on`], [`Self::add_on`] and [`Self::judge`] come in
    /// place of [`Bucket::write`] and [`Bucket::finish`].
    pub fn stays(&self) -> bool {
        self.device.as_ref().is_some_and(|own| own.header.is_some() && own.under_way)
    }

    /// Bytes in front of the payload, behind the header.
    pub fn message_header_bytes(&self) -> usize {
        self.device.as_ref().and_then(|own| own.header.as_ref()).map_or(0, Vec::len)
    }

    /// Writes this rank's block: the header, whose status is corrected where the gradient is not finite, and the message.
    /// Where it fails, the residual is as before, and the host can do it.
    pub fn write_on(&mut self, device: &impl Copies, control: &[u8], block: Span) -> Result<(), NotOnDevice> {
        let Some(own) = &mut self.device else { return Err(NotOnDevice::Absent) };
        let written = own.write_block(device, control, block);
        if written.is_err() {
            own.put_back();
            self.phase = Phase::Idle;
        }
        Ok(written?)
    }

    /// Launched before anybody knows the ranks' status: `out` (f32) becomes the mean of the messages in all ranks' blocks, behind
    /// `control` bytes of header each. [`Self::judge`] finds out what it means.
    pub fn add_on(&self, device: &impl Copies, blocks: Span, control: usize, out: Span) -> Result<(), ExchangeError> {
        let (n, world) = (self.values() as u64, self.member.world.max(1));
        let absent = ExchangeError::Order { bucket: self.index, what: "no message was made on the device" };
        let Some(own) = &self.device else { return Err(absent) };
        let [method] = own.methods[..] else { return Err(absent) };
        let (front, stride) = ((control + self.message_header_bytes()) as u64, blocks.bytes() / u64::from(world));
        let (to, refused) = (Target { out, scale: 1.0 / world as f32 }, own.layers.refused());
        device.zero(out)?;
        if let Some(k) = method.selected() {
            let payloads = blocks.part(front, blocks.bytes().saturating_sub(front));
            let room = ListRoom { counts: own.room, refused };
            return Ok(add_lists(device, &Lists { n, k, payloads, stride, ranks: world }, to, &room)?);
        }
        let Method::Quantize(quantizer, _) = method else { return Err(absent) };
        device.zero(refused)?;
        for rank in 0..u64::from(world) {
            let payload = blocks.part(rank * stride + front, method.payload_bytes(n));
            add(device, quantizer, n, payload, to)?;
        }
        Ok(())
    }

    /// Where the outcome of the message under way lies, with what [`Self::add_on`] found, to copy back with all ranks' headers.
    pub fn outcome_on(&self) -> Result<Span, ExchangeError> {
        Ok(self.on_device()?.layers.outcomes().part(0, OUTCOME_BYTES + REFUSED_BYTES))
    }

    /// Whether what [`Self::add_on`] left is the mean gradient. If not, the residual is as before.
    pub fn judge(&mut self, answers: Answers<'_>) -> Result<Ran, ExchangeError> {
        let index = self.index;
        let judged = self.device.as_ref().filter(|own| own.under_way).and_then(|own| own.header.as_ref());
        let Some(header) = judged else {
            return Err(ExchangeError::Order { bucket: index, what: "no message was made on the device" });
        };
        let foreign = answers.headers.iter().position(|other| other != header);
        let unread = answers.outcome.last_chunk::<4>().map_or(1, |bytes| u32::from_le_bytes(*bytes));
        self.take_phase()?;
        if answers.refused || foreign.is_some() || unread > 0 {
            self.put_back()?;
        }
        if answers.refused {
            return Ok(Ran::Refused);
        }
        if let Some(rank) = foreign {
            return Err(ExchangeError::Header { rank });
        }
        if unread > 0 {
            return Err(ExchangeError::Payload { rank: unread as usize - 1 });
        }
        if let (Some(outcome), Some(own)) = (answers.outcome.first_chunk(), &self.device) {
            self.energy = own.plan.energy(&[Outcome::read(outcome)]);
        }
        self.commit();
        Ok(Ran::Good)
    }

    /// AR-Topk: error feedback and, where this rank may lead, its selection, whose indices are fetched: the host waits.
    fn choose_on(&mut self, device: &impl Copies, gradient: Gradient, leader: Leader) -> Result<(), NotOnDevice> {
        let spec = *self.spec();
        let Some(own) = &mut self.device else { return Err(NotOnDevice::Absent) };
        let [Method::TopK(k)] = own.methods[..] else { return Err(NotOnDevice::Selection(spec.to_string())) };
        let may_lead = leader.may_be(self.member.rank);
        own.layers.choose(device, gradient, may_lead.then_some(k))?;
        let outcome = fetch_outcome(device, own.layers.outcomes())?;
        own.selected.clear();
        if outcome.refused {
            self.excuse(&EncodeError::NonFinite { index: 0, value: f32::NAN });
            return Ok(());
        }
        if may_lead {
            let mut bytes = vec![0; 4 * k as usize];
            device.download(own.layers.lists(k)?.indices, &mut bytes)?;
            own.selected.extend(bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)));
        }
        self.energy = Energy { sent: if may_lead { outcome.sent } else { 0.0 }, compensated: outcome.compensated };
        Ok(())
    }

    /// Adds up by kernels, where all messages are what they are expected to be; else the host's reader says best what is wrong.
    fn add_known(&self, device: &impl Copies, last: &LastRound<'_>, out: Span) -> Result<bool, ExchangeError> {
        let (own, pipeline) = (self.on_device()?, &self.run.pipeline);
        let (messages, ranks) = match last {
            LastRound::Sum(message) => (&[&message[..]][..], self.member.world.max(1) as usize),
            LastRound::Messages(messages) => (&messages[..], messages.len()),
            LastRound::Values(_) | LastRound::Refused => return Ok(false),
        };
        if own.plan.decoding == Decoding::Host || messages.is_empty() {
            return Ok(false);
        }
        let payloads = messages.iter().map(|message| unscaled_payload(pipeline, message, self.step));
        let Some(payloads) = payloads.collect::<Option<Vec<&[u8]>>>() else { return Ok(false) };
        device.zero(out)?;
        Ok(own.add_all(device, &payloads, Target { out, scale: 1.0 / ranks as f32 })?)
    }

    /// AR-Topk's sums at the agreed indices.
    fn scatter_on(&self, device: &impl Copies, sums: &[f32], out: Span) -> Result<Ran, ExchangeError> {
        if !sums.iter().all(|sum| sum.is_finite()) {
            return Ok(Ran::Refused);
        }
        let lists = self.on_device()?.layers.lists(sums.len() as u64)?;
        upload_words(device, lists.values, sums.iter().map(|sum| sum.to_le_bytes()))?;
        device.zero(out)?;
        add_mean(device, &lists, self.values() as u64, out, self.member.world.max(1))?;
        Ok(Ran::Good)
    }

    fn on_device(&self) -> Result<&OnDevice, ExchangeError> {
        self.device.as_ref().ok_or(self.not_on_a_device())
    }

    fn not_on_a_device(&self) -> ExchangeError {
        ExchangeError::Order { bucket: self.index, what: "it does not lie on a device" }
    }
}

/// A device, on whose stream kernels work.
impl<D: Copies> Place for D {
    type Values<'a> = Gradient;
    type Mean<'a> = Span;
    type Error = NotOnDevice;

    fn compress(&self, bucket: &mut Bucket, gradient: Gradient, leader: Option<Leader>) -> Result<(), NotOnDevice> {
        let (step, reference) = (bucket.step, bucket.known_rate());
        let Run { pipeline, rates, .. } = &mut bucket.run;
        let Some(own) = &mut bucket.device else { return Err(NotOnDevice::Absent) };
        own.header = None;
        if let Some(factors) = rates.factors(reference).filter(|_| own.plan.keeps) {
            own.rescale(self, pipeline.layers(), &factors)?;
        }
        rates.applied(reference);
        own.methods = own.plan.methods(step.index).unwrap_or_default();
        let before = own.done[0].learning_rate;
        let weight = if before == step.learning_rate { 1.0 } else { before / step.learning_rate };
        let gradient = Gradient { weights: (weight as f32, 1.0), ..gradient };
        match leader {
            Some(leader) => bucket.choose_on(self, gradient, leader)?,
            None => bucket.compress_on(self, gradient)?,
        }
        // The pipeline itself only frames messages now: its rate is this step's.
        bucket.run.pipeline.rebase(step.learning_rate);
        Ok(())
    }

    fn take(&self, bucket: &mut Bucket) -> Result<(), ExchangeError> {
        let (missing, agreed) = (bucket.not_on_a_device(), bucket.run.pipeline.agreed());
        let own = bucket.device.as_mut().ok_or(missing)?;
        let lists = own.layers.lists(agreed.len() as u64)?;
        upload_words(self, lists.indices, agreed.iter().map(|index| index.to_le_bytes()))?;
        let mut bytes = vec![0; 4 * agreed.len()];
        own.layers.take_at(self, lists.len)?;
        own.did_step(bucket.step);
        let outcome = fetch_outcome(self, own.layers.outcomes())?;
        self.download(lists.values, &mut bytes)?;
        bucket.values.clear();
        bucket.values.extend(f32s(&bytes));
        bucket.energy = own.plan.energy(&[outcome]);
        Ok(())
    }

    fn mean(&self, bucket: &mut Bucket, last: &LastRound<'_>, out: Span) -> Result<Ran, ExchangeError> {
        match last {
            LastRound::Refused => return Ok(Ran::Refused),
            LastRound::Values(sums) => return bucket.scatter_on(self, sums, out),
            _ if bucket.add_known(self, last, out)? => return Ok(Ran::Good),
            _ => {}
        }
        let mut values = vec![0.0; bucket.values()];
        let ran = Host.mean(bucket, last, &mut values)?;
        if ran == Ran::Good {
            upload_words(self, out, values.iter().map(|value| value.to_le_bytes()))?;
        }
        Ok(ran)
    }
}

impl OnDevice {
    /// This rank's selection for AR-Topk.
    pub(super) fn selected(&self) -> &[u32] {
        &self.selected
    }

    fn write_block(&self, device: &impl Copies, control: &[u8], block: Span) -> Result<(), LaunchError> {
        let front = [control, self.header.as_deref().unwrap_or_default()].concat();
        let payload = self.layers.payloads().part(0, self.plan.staying(&self.methods).unwrap_or(0));
        device.upload(block.part(0, front.len() as u64), &front)?;
        device.copy(block.part(front.len() as u64, payload.bytes()), payload)?;
        self.layers.mark(device, block.part(STATUS_AT as u64, 1), NOT_FINITE)
    }

    fn did_step(&mut self, Step { index, learning_rate }: Step) {
        self.done = [Done { learning_rate, step: Some(index) }, self.done[0]];
        self.under_way = true;
    }

    /// The steps so far count as steps at this rate.
    pub(super) fn rebase(&mut self, learning_rate: f64) {
        self.done.iter_mut().for_each(|done| done.learning_rate = learning_rate);
    }

    /// The step that was done counts.
    pub(super) fn keep(&mut self) {
        self.under_way = false;
    }

    /// A step that was not finished does not count.
    pub(super) fn put_back(&mut self) {
        if std::mem::take(&mut self.under_way) && self.plan.keeps {
            self.layers.put_back();
            self.done[0] = self.done[1];
        }
    }

    /// Multiplies each layer's residual by its factor, by way of the host: relations of rates hardly ever change.
    fn rescale(&self, device: &impl Copies, layers: &CpuLayers, factors: &[f32]) -> Result<(), LaunchError> {
        let each = layers.ranges().zip(factors).flat_map(|(range, factor)| range.map(|_| *factor));
        let mut each = each.fuse();
        let mut scaled = Vec::new();
        for span in self.layers.residual() {
            let mut bytes = vec![0; span.bytes() as usize];
            device.download(span, &mut bytes)?;
            for (value, factor) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(&mut each) {
                *value = (f32::from_le_bytes(*value) * factor).to_le_bytes();
            }
            scaled.push((span, bytes));
        }
        // Only when all are there: the host would rescale the first ones once more.
        scaled.iter().try_for_each(|(span, bytes)| device.upload(*span, bytes))
    }

    /// Waits, and makes the message of what the layers' kernels left; none where the gradient is not finite.
    fn fetch(
        &self,
        device: &impl Copies,
        pipeline: &Pipeline,
        step: Step,
        message: &mut Writer,
    ) -> Result<Option<Energy>, NotOnDevice> {
        let mut bytes = vec![0; self.layers.outcomes().bytes() as usize];
        device.download(self.layers.outcomes(), &mut bytes)?;
        let each = bytes.chunks_exact(Layers::OUTCOME as usize).take(self.methods.len());
        let outcomes: Vec<Outcome> =
            each.filter_map(|bytes| bytes.first_chunk::<{ OUTCOME_BYTES as usize }>()).map(Outcome::read).collect();
        if outcomes.iter().any(|outcome| outcome.refused) {
            return Ok(None);
        }
        let scaled = pipeline.factor_bytes() > 0;
        if scaled && outcomes.iter().any(|outcome| factor(outcome.energy()) != 1.0) {
            return Err(NotOnDevice::Variance);
        }
        let payloads = self.fetch_payloads(device, &outcomes)?;
        let written = write_message(&pipeline.message_header(step), message, |out| {
            if scaled {
                outcomes.iter().for_each(|_| out.f32(1.0));
            }
            out.raw(&payloads);
            Ok(())
        });
        written.map_err(|_| NotOnDevice::Parts(pipeline.spec().to_string()))?;
        Ok(Some(self.plan.energy(&outcomes)))
    }

    /// All layers' payloads, one after the other.
    fn fetch_payloads(&self, device: &impl Copies, outcomes: &[Outcome]) -> Result<Vec<u8>, LaunchError> {
        let (all, used) = (self.layers.payloads(), outcomes.iter().map(|outcome| outcome.bytes).sum::<u64>());
        // One copy, unless most of it would be gaps.
        let mut whole = vec![0; if all.bytes() <= 2 * used + 65_536 { all.bytes() as usize } else { 0 }];
        if !whole.is_empty() {
            device.download(all, &mut whole)?;
        }
        let mut bytes = Vec::new();
        for (outcome, (at, room)) in outcomes.iter().zip(self.layers.places()) {
            let length = outcome.bytes.min(room);
            match whole.get(at as usize..(at + length) as usize) {
                Some(payload) => bytes.extend_from_slice(payload),
                None => {
                    let start = bytes.len();
                    bytes.resize(start + length as usize, 0);
                    device.download(all.part(at, length), &mut bytes[start..])?;
                }
            }
        }
        Ok(bytes)
    }

    /// `out += scale * ` what the payloads mean, in their order. False, and `out` is unspecified, where one is none: the host's
    /// reader then says why.
    fn add_all(&self, device: &impl Copies, payloads: &[&[u8]], to: Target) -> Result<bool, LaunchError> {
        if self.plan.decoding == Decoding::Vote {
            return self.vote(device, payloads, to.out);
        }
        for payload in payloads {
            let mut from = Reader::new(payload);
            let (mut at, alone) = (0, self.methods.len() == 1);
            for (n, method) in self.plan.lengths().into_iter().zip(&self.methods) {
                let to = Target { out: to.out.part(4 * at, 4 * n), ..to };
                let room = alone.then_some(payload.len());
                if !self.add_layer(device, *method, &mut from, room, to)? {
                    return Ok(false);
                }
                at += n;
            }
            if from.finish().is_err() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn vote(&self, device: &impl Copies, payloads: &[&[u8]], out: Span) -> Result<bool, LaunchError> {
        let (n, ranks) = (out.bytes() / 4, payloads.len() as u32);
        let length = n.div_ceil(8);
        let stride = self.room.bytes() / u64::from(ranks.max(1));
        for (rank, payload) in (0..).zip(payloads) {
            if payload.len() as u64 != length {
                return Ok(false);
            }
            device.upload(self.room.part(rank * stride, length), payload)?;
        }
        majority(device, n, self.room, stride, ranks, out)?;
        Ok(true)
    }

    fn add_layer(
        &self,
        device: &impl Copies,
        method: Method,
        from: &mut Reader<'_>,
        alone: Option<usize>,
        to: Target,
    ) -> Result<bool, LaunchError> {
        let n = to.out.bytes() / 4;
        match self.plan.decoding {
            Decoding::Lists => return self.add_lists(device, from, to),
            Decoding::Drawn => {
                let Method::RandomK(how) = method else { return Ok(false) };
                let values = self.room.part(0, 4 * how.k);
                let Ok(bytes) = from.take("values", 4 * how.k as usize) else { return Ok(false) };
                device.upload(values, bytes)?;
                let at = Selection { len: how.k, indices: self.layers.indices(how.k), values };
                return scatter(device, &at, n, to).map(|()| true);
            }
            _ => {}
        }
        if let Method::Quantize(quantizer, _) = method
            && quantizer.is_elias(from.rest())
        {
            return Ok(false);
        }
        // Of a length that depends on the values there is one alone.
        let length = match method {
            Method::ThreeLc(_) | Method::Quantize(Quantizer::Inceptionn { .. }, _) => alone.unwrap_or(0),
            _ => method.payload_bytes(n) as usize,
        };
        if length as u64 > method.payload_bytes(n) {
            return Ok(false);
        }
        let Ok(bytes) = from.take("payload", length) else { return Ok(false) };
        let payload = self.room.part(0, length as u64);
        device.upload(payload, bytes)?;
        method.add(device, payload, n, to, self.layers.workspace())
    }

    fn add_lists(&self, device: &impl Copies, from: &mut Reader<'_>, to: Target) -> Result<bool, LaunchError> {
        let n = to.out.bytes() / 4;
        let (Ok(k), mut indices) = (from.u32("number of values"), Vec::new()) else { return Ok(false) };
        if read_indices(from, n as usize, k as usize, &mut indices).is_err() {
            return Ok(false);
        }
        let Ok(bytes) = from.take("values", 4 * k as usize) else { return Ok(false) };
        let k = u64::from(k);
        let lists = self.room.part(0, 8 * k);
        if lists.bytes() < 8 * k {
            return Ok(false);
        }
        let at = Selection { len: k, indices: lists.part(0, 4 * k), values: lists.part(4 * k, 4 * k) };
        upload_words(device, at.indices, indices.iter().map(|index| index.to_le_bytes()))?;
        device.upload(at.values, bytes)?;
        scatter(device, &at, n, to)?;
        Ok(true)
    }
}
