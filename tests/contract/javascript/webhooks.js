// Deliveries as the official JavaScript client reads them; it gets them as JSON in DELIVERIES. Run by tests/jobs/control/test_webhooks.py.
import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";

const { secret, events, deliveries } = JSON.parse(process.env.DELIVERIES);
const client = new OpenAI({ apiKey: "none", webhookSecret: secret });

test("each delivery is the event that it is for Python's client", async () => {
  const read = await Promise.all(deliveries.map(({ body, headers }) => client.webhooks.unwrap(body, headers)));
  assert.deepEqual(read.map((event) => [event.id, event.type, event.data.id]), events);
});

test("a body that was changed, and another secret, are refused", async () => {
  const [{ body, headers }] = deliveries;
  const refused = { name: "Error", message: /signature/ };
  await assert.rejects(client.webhooks.unwrap(body.replace("batch.", "other."), headers), refused);
  await assert.rejects(client.webhooks.unwrap(body, headers, `whsec_${btoa("another secret of someone")}`), refused);
});
