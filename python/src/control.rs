//! The part of `Core` by which the ranks agree: when a step begins and ends, what rank 0 announces, answers about live trials, samples
//! for the shadow trials of AR-Topk.

use crate::core::Core;
use crate::guard::{Failure, guard};
use crate::memory::Span;
use crate::session::Next;
use flexcomm_trainer::Answer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

#[pymethods]
impl Core {
    /// What the ranks agreed on, before `connect` and the first step: which run of the job this is (16 hexadecimal digits), whether
    /// rank 0 announces decisions and trials, and whether decisions are followed.
    fn agree(&self, run: &str, announced: bool, follow: bool) -> PyResult<()> {
        let mut session = self.lock();
        session.run = Some(run.parse().map_err(Failure::input)?);
        session.control.steer(announced);
        session.follow = follow;
        Ok(())
    }

    /// Whether the ranks answer in the next step whether they can run a live trial.
    fn trial_asked(&self) -> bool {
        self.lock().control.asked().is_some()
    }

    /// Why this rank can run no live trials from now on; none: it can.
    #[pyo3(signature = (why))]
    fn refuse_trials(&self, why: Option<String>) {
        self.lock().trials_refused = why;
    }

    /// Starts a step, before its first bucket. Answers this rank's answer, where the ranks gather those in it.
    fn begin<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let answer = guard(py, || {
            let mut session = self.lock();
            session.begin();
            Ok(session.answer())
        })?;
        Ok(answer.map(|answer| PyBytes::new(py, &answer.encode())))
    }

    /// Writes rank 0's control message, where one is broadcast in the step under way; answers whether.
    fn write_control(&self, out: Span) -> PyResult<bool> {
        let control = &self.lock().control;
        if !control.announces() {
            return Ok(false);
        }
        let (out, message) = (out.write::<u8>("the control message")?, control.message());
        if out.len() != message.len() {
            let got = out.len();
            return Err(Failure::Run(format!("failed to write a control message: the buffer has {got} bytes")).into());
        }
        out.copy_from_slice(&message);
        Ok(true)
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

    /// Takes in the control message that is due.
    fn take_control(&self, message: Span) -> PyResult<()> {
        let message = message.read::<u8>("the control message")?;
        Ok(self.lock().control.accept(message).map_err(Failure::from)?)
    }

    /// Ends a step, after the optimizer. With a `ticket` a device has the step's times: `resolve` brings them later, and until then
    /// nothing that came after it is reported. `answers` are what all ranks answered, where that was gathered in this step.
    #[pyo3(signature = (loss=None, ticket=None, answers=None))]
    fn finish(
        &self,
        py: Python<'_>,
        loss: Option<f64>,
        ticket: Option<u64>,
        answers: Option<Vec<Vec<u8>>>,
    ) -> PyResult<Next> {
        guard(py, || {
            let foreign =
                |rank| Failure::Run(format!("failed to end a step: rank {rank}'s answer about a trial cannot be read"));
            let read = |(rank, bytes): (usize, &Vec<u8>)| Answer::decode(bytes).ok_or_else(|| foreign(rank));
            let answers = answers.iter().flatten().enumerate().map(read).collect::<Result<Vec<_>, _>>()?;
            self.lock().finish(loss, ticket, &answers)
        })
    }
}
