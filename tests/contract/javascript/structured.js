// Answers with structure through the official JavaScript client and zod. Run by tests/contract/test_javascript.py.
import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.env.OPENAI_BASE_URL, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const asked = { model: "demo", messages: [{ role: "user", content: "What is 23 + 45?" }], max_tokens: 1500, temperature: 0 };
const Part = z.object({ kind: z.enum(["bolt", "nut"]), count: z.number().int().min(1).max(99) });
const Order = z.object({
  color: z.enum(["red", "dark green"]),
  parts: z.array(Part).min(1).max(2),
  address: z.object({ number: z.number().int().min(1).max(999), street: z.string().max(10).nullable() }),
  gift: z.boolean(),
});
const Add = z.object({ a: z.number().int().min(0).max(999), b: z.number().int().min(0).max(999) });
const Paint = z.object({ color: z.enum(["red", "blue"]) });

function tools(calls = []) {
  const add = ({ a, b }) => { calls.push("add"); return String(a + b); };
  const paint = ({ color }) => { calls.push("paint"); return `it is ${color}`; };
  return [
    zodFunction({ name: "add", description: "Add two numbers", parameters: Add, function: add }),
    zodFunction({ name: "paint", parameters: Paint, function: paint }),
  ];
}

const required = { ...asked, tool_choice: "required", parallel_tool_calls: false };

test("an answer is parsed as a zod object", async () => {
  const { choices: [choice] } = await client.chat.completions.parse({ ...asked, response_format: zodResponseFormat(Order, "order") });
  assert.equal(choice.finish_reason, "stop");
  assert.deepEqual(choice.message.parsed, Order.parse(JSON.parse(choice.message.content)));
});

test("a stream gives its content piece by piece, and the object at its end", async () => {
  const body = { ...asked, response_format: zodResponseFormat(Order, "order") };
  const pieces = [];
  const stream = client.chat.completions.stream(body).on("content.delta", ({ delta }) => pieces.push(delta));
  const done = new Promise((resolve) => stream.on("content.done", resolve));
  const { choices: [choice] } = await stream.finalChatCompletion();
  assert.equal(pieces.join(""), choice.message.content);
  assert.deepEqual((await done).parsed, choice.message.parsed);
  assert.deepEqual(choice.message.parsed, (await client.chat.completions.parse(body)).choices[0].message.parsed);
});

test("an answer that is cut is an error of the client's", async () => {
  const body = { ...asked, max_tokens: 5, response_format: zodResponseFormat(Order, "order") };
  await assert.rejects(client.chat.completions.parse(body), OpenAI.LengthFinishReasonError);
});

test("a call that is required is parsed", async () => {
  const { choices: [choice] } = await client.chat.completions.parse({ ...required, tools: tools() });
  assert.deepEqual([choice.finish_reason, choice.message.content], ["tool_calls", null]);
  const [{ function: called }, ...others] = choice.message.tool_calls;
  assert.equal(others.length, 0);
  assert.deepEqual(called.parsed_arguments, { add: Add, paint: Paint }[called.name].parse(JSON.parse(called.arguments)));
});

test("a streamed call is put together", async () => {
  const pieces = [];
  const stream = client.chat.completions.stream({ ...required, tools: tools() });
  stream.on("tool_calls.function.arguments.delta", ({ arguments_delta: delta }) => pieces.push(delta));
  const { choices: [choice] } = await stream.finalChatCompletion();
  const [{ id, function: called }] = choice.message.tool_calls;
  assert.ok(id);
  assert.equal(pieces.join(""), called.arguments);
  assert.ok(called.parsed_arguments);
});

for (const stream of [false, true]) {
  test(`tools are run in a loop${stream ? ", streamed" : ""}`, async () => {
    const calls = [];
    const runner = client.chat.completions.runTools({ ...required, stream, tools: tools(calls) }, { maxChatCompletions: 2 });
    await runner.done();
    assert.equal(calls.length, 2);
    assert.deepEqual(runner.messages.map(({ role }) => role), ["user", "assistant", "tool", "assistant", "tool"]);
    const answer = await client.chat.completions.create({ ...asked, max_tokens: 20, messages: runner.messages });
    assert.ok(answer.choices[0].message.content);
  });
}

test("the one function that is named is run once", async () => {
  const calls = [];
  const tool_choice = { type: "function", function: { name: "paint" } };
  const runner = client.chat.completions.runTools({ ...asked, tool_choice, tools: tools(calls) });
  assert.match(await runner.finalFunctionToolCallResult(), /^it is (red|blue)$/);
  assert.deepEqual(calls, ["paint"]);
});

test("a schema that cannot be is refused with its parameter", async () => {
  const response_format = { type: "json_schema", json_schema: { name: "x", schema: { type: "number or so" } } };
  await assert.rejects(client.chat.completions.create({ ...asked, response_format }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.match(error.param, /^response_format/);
    return true;
  });
});
