//! The controller and its connections to the agents.

use super::{Answer, Call, Carries, NodeContext, json_bytes};
use flexcomm_controller::Embedded;
use flexcomm_domain::NodeName;
use std::time::Duration;

/// The controller with the connections of its agents.
#[derive(Debug)]
pub(super) struct ControllerSide {
    pub(super) controller: Embedded,
    pub(super) problems: Vec<String>,
    names: Vec<NodeName>,
    instances: Vec<u64>,
    /// Epoch of the orders that each agent was sent last; none before it follows.
    sent: Vec<Option<u64>>,
    /// When the next pass's timer runs out, seconds.
    pass_at: f64,
    /// All reports, with when they arrived by the job's clock.
    #[cfg(test)]
    pub(super) taken: Vec<(f64, usize, flexcomm_wire::Report)>,
    /// When heartbeats arrived by the job's clock, and whose.
    #[cfg(test)]
    pub(super) heartbeats: Vec<(f64, usize)>,
}

impl ControllerSide {
    pub(super) fn new(controller: Embedded, names: Vec<NodeName>) -> Self {
        let (instances, sent) = (vec![0; names.len()], vec![None; names.len()]);
        Self {
            controller,
            problems: Vec::new(),
            names,
            instances,
            sent,
            pass_at: f64::INFINITY,
            #[cfg(test)]
            taken: Vec::new(),
            #[cfg(test)]
            heartbeats: Vec::new(),
        }
    }

    fn set_time(&mut self, context: &NodeContext<'_>) {
        self.controller.set_time(Duration::from_secs_f64(context.now()));
    }

    /// Sets the timer of the next pass, where none runs out before.
    pub(super) fn arm(&mut self, context: &mut NodeContext<'_>) {
        let next = self.controller.next_pass().as_secs_f64();
        if next < self.pass_at {
            self.pass_at = next;
            context.set(next, Carries::Pass);
        }
    }

    /// A pass's timer ran out.
    pub(super) fn pass(&mut self, context: &mut NodeContext<'_>) {
        let due = self.controller.next_pass();
        self.set_time(context);
        // Rounding must not make it early: a microsecond less is no time to pass.
        let is_due = due.as_secs_f64() <= context.now() + 1e-6;
        if is_due {
            self.controller.set_time(due);
            if let Err(why) = self.controller.pass() {
                self.problems.push(why);
            }
            self.publish(context);
        }
        if self.pass_at <= context.now() {
            self.pass_at = f64::INFINITY;
        }
        self.arm(context);
    }

    /// Sends new orders to those who follow.
    fn publish(&mut self, context: &mut NodeContext<'_>) {
        for (node, name) in self.names.iter().enumerate() {
            let (Some(sent), Some(orders)) = (self.sent[node], self.controller.orders(name)) else { continue };
            if orders.orders.epoch > sent {
                self.sent[node] = Some(orders.orders.epoch);
                context.answer(node, orders.json.len(), Answer::Orders(orders));
            }
        }
    }

    /// A request of an agent arrived.
    pub(super) fn call(&mut self, context: &mut NodeContext<'_>, node: usize, call: Call) {
        self.set_time(context);
        let name = &self.names[node];
        match call {
            Call::Register(request) => {
                let answer = self.controller.register(&request);
                self.instances[node] = request.instance;
                context.answer(node, answer.as_ref().map_or(0, json_bytes), Answer::Registered(answer));
            }
            Call::Follow => self.sent[node] = Some(0),
            Call::Heartbeat(heartbeat) => {
                #[cfg(test)]
                self.heartbeats.push((context.network.now(), node));
                let answer = self.controller.heartbeat(name, &heartbeat);
                context.answer(node, 0, Answer::Alive(answer));
            }
            Call::Reports(reports) => {
                #[cfg(test)]
                self.taken.extend(reports.iter().map(|report| (context.network.now(), node, report.clone())));
                let answer = self.controller.reports(name, self.instances[node], reports);
                context.answer(node, answer.as_ref().map_or(0, json_bytes), Answer::Stored(answer));
            }
        }
        self.publish(context);
        self.arm(context);
    }
}
