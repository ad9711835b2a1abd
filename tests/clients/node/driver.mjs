// Runs fly-admin on request: one JSON object a line in, one out. See tests/clients/driven.py for the other end.
//
// A request names a method and its arguments: {"call": "Machine.getMachine", "args": [{...}]}. The library is used as
// published; `createClient` has no way to set the address, the class behind it has.

import { createRequire } from 'node:module'
import { createInterface } from 'node:readline'

// The library is installed where the driver is started, not where it lies.
const require = createRequire(`${process.cwd()}/`)
const Client = require('fly-admin/dist/client').default

const { ENDPOINT, TOKEN } = process.env
const client = new Client(TOKEN, { apiUrl: ENDPOINT, graphqlUrl: ENDPOINT })

async function answer({ call, args }) {
  const [group, method] = call.split('.')
  try {
    return { ok: (await client[group][method](...args)) ?? null }
  } catch (error) {
    return { error: { kind: error.name, message: error.message } }
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  process.stdout.write(`${JSON.stringify(await answer(JSON.parse(line)))}\n`)
}
