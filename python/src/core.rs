//! The class that Python sees: settings, steps, trials, state.

use crate::guard::{Failure, guard};
use crate::memory::Span;
use crate::names::compressor;
use crate::session::{Leadership, Running, Session};
use flexcomm_compression::{Layers, Sizes};
use flexcomm_domain::spec::CompressorSpec;
use flexcomm_domain::{Collective, Family, JobId, Rank, Strategy, default_compressors};
use flexcomm_exchange::{LeaderShadows, Param, PipelineState, Shadows, layers};
use flexcomm_trainer::{Answer, Client, LEAST_GAIN};
use flexcomm_wire::{CodecInfo, Hello, PROTOCOL};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// One rank's side of one attached model. All methods may be called from any thread.
#[pyclass(frozen)]
pub struct Core {
    session: Mutex<Session>,
    /// All parameters.
    model: Vec<Param>,
}

impl Core {
    /// The session, also after a panic elsewhere: it then reports what does not fit as an error.
    pub fn lock(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Core {
    /// Whether saved pipelines of what the user named can be put back.
    fn check_states(&self, session: &Session, states: &[PipelineState]) -> Result<(), Failure> {
        let Some(named) = session.named else { return Ok(()) };
        for (ids, state) in states {
            let params: Option<Vec<Param>> = ids.iter().map(|id| self.model.get(*id as usize).copied()).collect();
            let foreign = || Failure::Run("failed to load a pipeline: it has parameters of another model".into());
            session.store.check_state(&named.spec, &params.ok_or_else(foreign)?, state)?;
        }
        Ok(())
    }
}

fn hello(session: &Session, all: &Layers, backend: String, collectives: Vec<String>) -> Hello {
    let families = std::iter::once(Family::from(CompressorSpec::NONE)).chain(default_compressors());
    Hello {
        protocol: PROTOCOL,
        job: session.job.clone(),
        run: session.run,
        rank: session.rank.0,
        world: session.world,
        gradient_values: all.values() as u64,
        backend,
        codecs: families.map(|family| CodecInfo::new(family, Sizes::codec(family, all))).collect(),
        collectives,
    }
}

#[pymethods]
impl Core {
    /// `model` lists values and values per row of every parameter; its place in the list is the parameter's id. `spec`
    /// is its compressor where a pipeline is to run it until the first decision.
    #[new]
    #[pyo3(signature = (job, rank, world, model, *, strategy, first_step, selection, seed, shadow_share, spec=None))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        job: &str,
        rank: u32,
        world: u32,
        model: Vec<(usize, usize)>,
        strategy: &str,
        first_step: u64,
        selection: &str,
        seed: u64,
        shadow_share: f64,
        spec: Option<&str>,
    ) -> PyResult<Self> {
        let job = JobId::new(job).map_err(Failure::input)?;
        let strategy: Strategy = strategy.parse().map_err(Failure::input)?;
        let leadership: Leadership = selection.parse()?;
        if world == 0 || rank >= world {
            return Err(Failure::input(format!("rank {rank} is none of {world} ranks")).into());
        }
        if !(shadow_share > 0.0 && shadow_share <= 1.0) {
            return Err(Failure::input(format!("shadow_share is {shadow_share}, allowed is above 0, at most 1")).into());
        }
        let mut session = Session::new((job, Rank(rank), world), (strategy, first_step), leadership, seed);
        session.shadows = Shadows::new(shadow_share, seed);
        session.named = spec.map(compressor).transpose()?.map(Running::of);
        if let Some((len, cols)) = model.iter().find(|(len, cols)| *cols == 0 || !len.is_multiple_of(*cols)) {
            return Err(Failure::input(format!("a parameter of {len} values has no rows of {cols}")).into());
        }
        let model: Vec<Param> =
            model.into_iter().enumerate().map(|(id, (len, cols))| Param { id: id as u32, len, cols }).collect();
        session.leader_shadows = LeaderShadows::new(&model);
        Ok(Self { session: Mutex::new(session), model })
    }

    /// Which run of the job this is: 16 hexadecimal digits, the same on all ranks. Before `connect`.
    fn set_run(&self, run: &str) -> PyResult<()> {
        self.lock().set_run(run.parse().map_err(Failure::input)?);
        Ok(())
    }

    /// Starts the client of the agent behind `socket`. `collectives` are those that this backend can run.
    fn connect(&self, socket: PathBuf, backend: String, collectives: Vec<String>) -> PyResult<()> {
        let mut session = self.lock();
        if let Some(bad) = collectives.iter().find(|c| c.parse::<Collective>().is_err()) {
            return Err(Failure::input(format!("collective {bad:?} is not known")).into());
        }
        let all = layers(&self.model).map_err(Failure::input)?;
        let hello = hello(&session, &all, backend, collectives);
        session.reporter.connect(Client::start(&socket, hello)?);
        Ok(())
    }

    /// Whether decisions are followed, and whether this rank's loop can replay batches for live trials.
    fn behave(&self, follow: bool, live: bool) {
        let mut session = self.lock();
        session.follow = follow;
        session.live = live;
        session.no_room = None;
    }

    /// Whether the ranks answer in the next step whether they can run a live trial.
    fn trial_asked(&self) -> bool {
        self.lock().control.asked().is_some()
    }

    /// Until `behave` this rank can take no snapshot for a live trial: why.
    fn lacks_room(&self, why: String) {
        self.lock().no_room = Some(why);
    }

    /// Whether rank 0 announces anything: the same on all ranks, before the first step.
    fn steer(&self, steered: bool) {
        self.lock().control.steer(steered);
    }

    /// Starts a step, before its first bucket. Answers whether a control message is broadcast in it, see `write_control`; and
    /// this rank's answer where the ranks gather those in it.
    fn begin<'py>(&self, py: Python<'py>) -> PyResult<(bool, Option<Bound<'py, PyBytes>>)> {
        let (announces, answer) = guard(py, || {
            let mut session = self.lock();
            session.begin();
            Ok((session.control.announces(), session.answer()))
        })?;
        Ok((announces, answer.map(|answer| PyBytes::new(py, &answer.encode()))))
    }

    /// Writes rank 0's control message for the broadcast of this step to a buffer: address and bytes.
    fn write_control(&self, out: (usize, usize)) -> PyResult<()> {
        let out = Span::new::<u8>("the control message", out.0, out.1)?.bytes_mut();
        let message = self.lock().control.message();
        let wrong = || Failure::Run(format!("failed to write a control message: the buffer has {} bytes", out.len()));
        if out.len() != message.len() {
            return Err(wrong().into());
        }
        out.copy_from_slice(&message);
        Ok(())
    }

    /// After `begin`: this rank's sample of its gradient, where the ranks send rank 0 theirs in this step; of one size on all ranks.
    fn sample<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let sample = guard(py, || Ok(self.lock().sample()))?;
        Ok(sample.map(|sample| PyBytes::new(py, &sample)))
    }

    /// On rank 0, before `finish`: all ranks' samples of the step under way, in rank order.
    fn take_samples(&self, py: Python<'_>, rows: Vec<Vec<u8>>) -> PyResult<()> {
        guard(py, || {
            self.lock().take_samples(&rows);
            Ok(())
        })
    }

    /// Whether the step under way ends with the control message that was broadcast last: `take_control` comes before `finish`.
    fn awaits_control(&self) -> bool {
        self.lock().control.is_due()
    }

    /// Takes in the control message that is due: address and bytes.
    fn take_control(&self, message: (usize, usize)) -> PyResult<()> {
        let message = Span::new::<u8>("the control message", message.0, message.1)?.bytes();
        Ok(self.lock().control.accept(message).map_err(Failure::from)?)
    }

    /// The bucket at `index` holds the parameters with these ids.
    fn layout(&self, py: Python<'_>, index: usize, ids: Vec<u32>) -> PyResult<()> {
        guard(py, || {
            let unknown =
                |id: &u32| Failure::Run(format!("failed to lay out bucket {index}: parameter {id} is not known"));
            let find = |id: &u32| self.model.get(*id as usize).copied().ok_or_else(|| unknown(id));
            let params = ids.iter().map(find).collect::<Result<Vec<_>, _>>()?;
            Ok(self.lock().store.layout(index, params)?)
        })
    }

    /// Ends a step, after the optimizer. Answers what to do: 0 nothing, 1 another decision is in force, 2 take a
    /// snapshot (a trial starts), 3 restore (the next candidate), 4 restore (the trial is over), 5 keep what this step did
    /// (the trial is over, because its loop was left). With a `ticket` a device
    /// has the step's times: `resolve` brings them later, and until then nothing that came after it is reported. `answers` are what
    /// all ranks answered, where that was gathered in this step.
    #[pyo3(signature = (loss=None, ticket=None, answers=None))]
    fn finish(
        &self,
        py: Python<'_>,
        loss: Option<f64>,
        ticket: Option<u64>,
        answers: Option<Vec<Vec<u8>>>,
    ) -> PyResult<u8> {
        guard(py, || {
            let foreign =
                |rank| Failure::Run(format!("failed to end a step: rank {rank}'s answer about a trial cannot be read"));
            let read = |(rank, bytes): (usize, &Vec<u8>)| Answer::decode(bytes).ok_or_else(|| foreign(rank));
            let answers = answers.iter().flatten().enumerate().map(read).collect::<Result<Vec<_>, _>>()?;
            Ok(self.lock().finish(loss, ticket, &answers)? as u8)
        })
    }

    /// Why this rank had no part in an exchange of the step under way: 0 it had, 1 it failed, 2 its gradient was not finite; and
    /// its reason.
    fn fault(&self) -> (u8, String) {
        let session = self.lock();
        session.fault.as_ref().map_or((0, String::new()), |fault| (fault.status as u8, fault.why.clone()))
    }

    /// The seconds of computing, compressing, collectives and all of a step that ended with this ticket; none: they will
    /// never be known, and the step is not reported.
    #[pyo3(signature = (ticket, times=None))]
    fn resolve(&self, ticket: u64, times: Option<[f64; 4]>) {
        let duration = |seconds: f64| Duration::try_from_secs_f64(seconds).ok();
        let times = times.and_then(|[compute, comp, sync, step]| {
            Some([duration(compute)?, duration(comp)?, duration(sync)?, duration(step)?])
        });
        self.lock().resolve(ticket, times);
    }

    /// Seconds that the caller itself has compressed: before a collective, where backward waited for it, or after one.
    fn worked(&self, seconds: f64, in_hook: bool) {
        self.lock().meter.worked(Duration::try_from_secs_f64(seconds).unwrap_or_default(), in_hook);
    }

    /// Whether the next step needs the hook, where DDP has exchanged dense buckets by itself.
    fn wants_hook(&self) -> bool {
        self.lock().wants_hook()
    }

    /// A gradient or a loss was not finite: a running trial ends with the next iteration, on all ranks.
    fn diverged(&self) {
        self.lock().diverged = true;
    }

    /// Copies what a step changes here; one copy is kept.
    fn save(&self, py: Python<'_>) -> PyResult<()> {
        guard(py, || {
            let session = &mut *self.lock();
            session.store.save(&session.auto);
            Ok(())
        })
    }

    /// Puts the copy back, bit for bit.
    fn restore(&self, py: Python<'_>) -> PyResult<()> {
        guard(py, || {
            let session = &mut *self.lock();
            Ok(session.store.restore(&mut session.auto)?)
        })
    }

    /// The residuals, by parameter id, as float32 in native byte order.
    fn residuals(&self, py: Python<'_>) -> PyResult<BTreeMap<u32, Vec<u8>>> {
        guard(py, || {
            let bytes = |values: Vec<f32>| values.iter().flat_map(|v| v.to_ne_bytes()).collect();
            Ok(self.lock().store.export()?.into_iter().map(|(id, values)| (id, bytes(values))).collect())
        })
    }

    /// Replaces the residuals: id, address and length of float32 values; and the pipelines of a compressor spec: its text,
    /// the step that comes next, parameters' ids and bytes by bucket. Answers whether the pipelines go on: they do
    /// under the same spec. Changes nothing when any of it does not fit.
    #[pyo3(signature = (state, pipelines=None))]
    fn set_residuals(
        &self,
        py: Python<'_>,
        state: Vec<(u32, usize, usize)>,
        pipelines: Option<(String, u64, Vec<PipelineState>)>,
    ) -> PyResult<bool> {
        guard(py, || {
            let take =
                |(id, address, len)| Ok((id, Span::new::<f32>("a saved parameter", address, len)?.floats().to_vec()));
            let state = state.into_iter().map(take).collect::<Result<BTreeMap<_, _>, Failure>>()?;
            let session = &mut *self.lock();
            let same = |spec: &str| session.named.is_some_and(|named| named.spec.to_string() == spec);
            let pipelines = pipelines.filter(|(spec, _, _)| same(spec));
            if let Some((_, _, states)) = &pipelines {
                self.check_states(session, states)?;
            }
            session.store.import(state, &self.model)?;
            let goes_on = pipelines.is_some();
            if let Some((_, step, states)) = pipelines {
                let now = session.next_step();
                session.named.iter_mut().for_each(|named| named.offset = step.wrapping_sub(now));
                session.store.await_pipelines(states);
            }
            Ok(goes_on)
        })
    }

    /// The state of the pipelines for a checkpoint: compressor, step that comes next, and by bucket the parameters' ids and
    /// bytes. None when what the user named is not in force.
    fn pipeline_states(&self, py: Python<'_>) -> PyResult<Option<(String, u64, Vec<PipelineState>)>> {
        guard(py, || {
            let session = self.lock();
            let (step, version) = (session.next_step(), session.control.look().in_force().version.0);
            let Some(named) = session.named.filter(|_| version == 0) else { return Ok(None) };
            let states = session.store.pipelines()?;
            Ok(Some((named.spec.to_string(), step.wrapping_add(named.offset), states)))
        })
    }

    /// Begins shadow trials of these strategies with the next step.
    fn shadow(&self, strategies: Vec<String>) -> PyResult<()> {
        let parse = |text: &String| text.parse::<Strategy>().map_err(Failure::input);
        let strategies = strategies.iter().map(parse).collect::<Result<Vec<_>, _>>()?;
        if let Some(bad) = strategies.iter().find(|s| !Shadows::has(s)) {
            return Err(Failure::input(format!(
                "{bad} has no shadow: dense loses nothing, and what AR-Topk keeps depends on other ranks"
            ))
            .into());
        }
        let mut session = self.lock();
        // These are not the newest trial's, and its report is not theirs to complete.
        session.reporter.forget_trial();
        session.shadows.watch(&strategies);
        Ok(())
    }

    /// Shadow gains so far: strategy, gain, steps.
    fn shadow_gains(&self) -> Vec<(String, f64, u64)> {
        self.lock().shadows.gains().map(|(strategy, found)| (strategy.to_string(), found.gain, found.steps)).collect()
    }

    /// Step, version, strategy, iteration of a trial (or -1), connected to an agent, steps of this process.
    fn state(&self) -> (u64, u64, String, i64, bool, u64) {
        let session = self.lock();
        let agreement = session.control.look();
        let in_force = agreement.in_force();
        let iteration = agreement.tick().trial.map_or(-1, |trial| i64::from(trial.iteration));
        let connected = session.reporter.client().is_some_and(Client::connected);
        let strategy = in_force.strategy.to_string();
        (agreement.step(), in_force.version.0, strategy, iteration, connected, session.steps())
    }

    /// What the step under way runs, for collectives whose shape the backend can be told: whether the ranks agreed on
    /// it (a decision, or a trial's candidate), the strategy, and a number for the log.
    fn tick(&self) -> PyResult<(bool, String, u64)> {
        let tick = self.lock().now()?;
        let agreed = tick.version.0 > 0 || tick.trial.is_some();
        Ok((agreed, tick.strategy.to_string(), tick.index()))
    }

    /// What the newest step cost on this rank whose times are known, whatever ran: seconds of forward and backward, of compressing, of its
    /// collectives, of all of it; bytes sent; the share of the gradient's energy that was sent.
    fn costs(&self) -> Option<(f64, f64, f64, f64, u64, f64)> {
        self.lock().last.map(|costs| {
            let [compute, comp, sync, step] =
                [costs.compute, costs.comp, costs.sync, costs.step].map(|part| part.as_secs_f64());
            (compute, comp, sync, step, costs.bytes, costs.gain.clamp(LEAST_GAIN, 1.0))
        })
    }

    /// Mode (star or var), skew and staleness of the automatic choice of leaders.
    fn auto(&self) -> (String, f64, u64) {
        let session = self.lock();
        (session.auto.mode().to_string(), session.auto.skew(), session.auto.staleness())
    }

    /// Hands the last reports to the agent and says goodbye.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        guard(py, || {
            self.lock().flush();
            Ok(())
        })
    }
}
